"""Returns the sum of the bytes of FILE as SUM; each number of FILL is the first byte.

Request parameters:
    sleep_ms: the time before the response.
    count: the number of elements of FILL; the default is the number in the configuration.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        parameters = json.loads(request.parameters() or "{}")
        file = np.frombuffer(pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy()[0], np.uint8)
        time.sleep(parameters.get("sleep_ms", 0) / 1000)
        fill = np.full(parameters.get("count", 131072), file[0], np.float32)
        total = np.array([file.sum(dtype=np.int64)], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total), pb_utils.Tensor("FILL", fill)])
