"""Sends the words of a text one by one: a decoupled model, as a language model would be."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

PAUSE_S = 0.1


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self._send_words(request)

    def _send_words(self, request):
        sender = request.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        for word in text.split():
            if request.is_cancelled():  # the client disconnected
                break
            output = pb_utils.Tensor("WORD", np.array([f"{word} ".encode()], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([output]))
            time.sleep(PAUSE_S)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
