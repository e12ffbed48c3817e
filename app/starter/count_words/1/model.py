"""Counts the words of a text and finds the longest word."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        words = pb_utils.get_input_tensor_by_name(request, "CLEAN").as_numpy()[0].decode().split()
        longest = max(words, key=len, default="")
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("COUNT", np.array([len(words)], dtype=np.int32)),
                pb_utils.Tensor("LONGEST", np.array([longest.encode()], dtype=np.object_)),
            ]
        )
