"""Returns T as SCRIPT (JSON) defines it.

Keys of SCRIPT: ``omit`` (T), ``shape``, ``float64``, ``count`` of responses, ``error`` [code, text].
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        scripts = [json.loads(pb_utils.get_input_tensor_by_name(each, "SCRIPT").as_numpy().item()) for each in requests]
        return [answer for script in scripts for answer in [_answer(script)] * script.get("count", 1)]


def _answer(script):
    if "error" in script:
        code, text = script["error"]
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, getattr(pb_utils.TritonError, code)))
    dtype = np.float64 if script.get("float64") else np.float32
    tensor = pb_utils.Tensor("T", np.zeros(script.get("shape", [1, 3, 4]), dtype))
    return pb_utils.InferenceResponse([] if script.get("omit") else [tensor])
