"""Answers the text of a number n with the vector [n, -n]."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

SERVICE_S = 0.002


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(SERVICE_S)
        return [_response(request) for request in requests]


def _response(request):
    texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
    vectors = [[float(text), -float(text)] for text in texts[:, 0]]
    return pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", np.array(vectors, np.float32))])
