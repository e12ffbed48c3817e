"""Sleeps as many milliseconds as the file BENCH_SLEEP_MS says, so that its time is not the machine's."""

import os
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

DEFAULT_MS = "1"


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        path = os.environ.get("BENCH_SLEEP_MS")
        time.sleep(float(Path(path).read_text() if path else DEFAULT_MS) / 1e3)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
        )
