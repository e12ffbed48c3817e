"""FILE -> SIZE, its number of bytes."""

import numpy as np
from model_kit.serving import answer_each, input_of


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, lambda request: {"SIZE": np.array([len(input_of(request, "FILE")[0])], np.int32)})
