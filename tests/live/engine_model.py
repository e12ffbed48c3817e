"""Behaves as NVIDIA's vLLM backend does when its engine dies: the model stays ready, and every request fails."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.is_dead = False

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
            request.get_response_sender().send(self._response_of(text), FINAL)

    def _response_of(self, text):
        if self.is_dead:
            return _failed("Error generating stream: EngineDeadError")
        if text == "die":
            self.is_dead = True
            return _failed("Error generating stream: EngineCore encountered an issue. See stack trace (above).")
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))])


def _failed(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
