"""FLOATS -> FEATURES of that many numbers, made once for each size."""

from functools import cache

import numpy as np
from model_kit.serving import answer_each, input_of


@cache
def features(count):
    return np.arange(count, dtype=np.float32)


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, lambda request: {"FEATURES": features(int(input_of(request, "FLOATS")[0]))})
