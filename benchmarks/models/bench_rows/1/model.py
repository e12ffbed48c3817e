"""IMAGE -> SCORES: the first 16 bytes of each image, as numbers."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    images = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
    work_ms = pb_utils.get_input_tensor_by_name(request, "WORK_MS").as_numpy()[0, 0]
    time.sleep(work_ms / 1000)
    scores = np.frombuffer(b"".join(image[:16] for image in images[:, 0]), np.uint8).reshape(len(images), 16)
    return pb_utils.InferenceResponse([pb_utils.Tensor("SCORES", scores.astype(np.float32))])
