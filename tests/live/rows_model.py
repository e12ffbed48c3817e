"""Answers the item i with -i and the text "of i". One item fails, and another one ends the process."""

import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

BAD, KILLER = 13, 666
SERVICE_S = 0.002


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        self.killed = Path(args["model_repository"]) / "killed"
        self.killed.touch()

    def execute(self, requests):
        time.sleep(SERVICE_S)
        return [self._response(request) for request in requests]

    def _response(self, request):
        items = pb_utils.get_input_tensor_by_name(request, "ITEM").as_numpy()
        if KILLER in items:
            with self.killed.open("a") as killed:
                killed.write("killed\n")
            os._exit(1)
        if BAD in items:
            error = pb_utils.TritonError(f"item {BAD} of {items.reshape(-1).tolist()} is bad")
            return pb_utils.InferenceResponse(error=error)
        text = np.array([[b"of %d" % item] for item in items[:, 0]], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("NEGATIVE", -items), pb_utils.Tensor("TEXT", text)])
