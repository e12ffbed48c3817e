"""Sends the responses of one row.

Keys of SCRIPT (JSON):
    words: the values of TEXT, one for each response.
    error: the message of an error after the last response.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            _send(request, request.get_response_sender())


def _send(request, sender):
    given = pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()
    script = json.loads(given[0, 0]) if len(given) == 1 else {"error": f"{len(given)} rows"}
    for number, word in enumerate(script.get("words", [])):
        text = pb_utils.Tensor("TEXT", np.array([[word.encode()]], dtype=np.object_))
        sender.send(pb_utils.InferenceResponse([text, pb_utils.Tensor("NUMBER", np.array([[number]], np.int32))]))
    if "error" in script:
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(script["error"])))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
