"""Removes surplus spaces from a text. A text without words ends the ensemble early."""

import numpy as np
import triton_python_backend_utils as pb_utils

NO_TEXT = "EARLY_EXIT[no_text]"
"""gateway.yaml has the same message in its early-exit rule."""


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        words = text.split()
        if not words:
            # The error of one request. An exception would fail every request of the batch.
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(NO_TEXT, pb_utils.TritonError.ALREADY_EXISTS))
        clean = np.array([" ".join(words).encode()], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("CLEAN", clean)])
