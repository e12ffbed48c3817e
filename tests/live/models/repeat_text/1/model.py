"""Returns the prompt in REPETITION responses if STREAM is true, otherwise in one response.

The model also returns the other inputs; for ``grid`` it returns the shape.

Request parameters:
    REPETITION: the number of responses.
    DELAY: seconds before each response.
    FAIL_LAST: sends an error with the code ERROR_CODE after the responses.
    SHOW: also returns the request parameters.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            _answer(request)


def _answer(request):
    parameters = json.loads(request.parameters() or "{}")
    sender = request.get_response_sender()
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    response = pb_utils.InferenceResponse(_outputs(inputs, parameters))
    if not inputs["STREAM"].item():
        sender.send(response, flags=FINAL)
        return
    for _ in range(parameters.get("REPETITION", 1)):
        time.sleep(parameters.get("DELAY", 0))
        sender.send(response)
    if parameters.get("FAIL_LAST"):
        code = getattr(pb_utils.TritonError, parameters.get("ERROR_CODE", "INTERNAL"))
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("An Error Occurred", code)), flags=FINAL)
    else:
        sender.send(flags=FINAL)


def _outputs(inputs, parameters):
    outputs = [pb_utils.Tensor("TEXT", inputs["PROMPT"])]
    if "input_ids" in inputs:
        outputs.append(pb_utils.Tensor("IDS", inputs["input_ids"]))
    if "scale" in inputs:
        outputs.append(pb_utils.Tensor("SCALE", inputs["scale"]))
    if "grid" in inputs:
        outputs.append(pb_utils.Tensor("SHAPE", np.array(inputs["grid"].shape, dtype=np.int32)))
    if parameters.get("SHOW"):
        shown = json.dumps(parameters, sort_keys=True)
        outputs.append(pb_utils.Tensor("PARAMETERS", np.array([shown.encode()], dtype=np.object_)))
    return outputs
