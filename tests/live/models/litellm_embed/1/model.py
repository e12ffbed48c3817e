"""Returns the length of each text, the sum of its bytes and its first byte (NaN if empty), each divided by 7."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    texts = pb_utils.get_input_tensor_by_name(request, "input_text").as_numpy()
    numbers = np.array([_numbers_of(text) for text in texts], np.float32).reshape(-1, 3)
    return pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", numbers / np.float32(7))])


def _numbers_of(text):
    return len(text), sum(text), text[0] if text else float("nan")
