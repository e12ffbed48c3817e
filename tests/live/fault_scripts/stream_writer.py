"""Sends two responses with T, which has the ``shape`` of SCRIPT (JSON).

``returns`` returns the response instead, which is an error for decoupled models.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            script = json.loads(pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()[0])
            tensor = pb_utils.Tensor("T", np.zeros(script.get("shape", [1, 3, 4]), np.float32))
            answer = pb_utils.InferenceResponse([] if script.get("omit") else [tensor])
            if script.get("returns"):
                return [answer]
            sender = request.get_response_sender()
            sender.send(answer)
            sender.send(answer, flags=FINAL)
        return None
