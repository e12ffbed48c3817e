"""Fails on request parameters that it does not know, as NVIDIA's vLLM backend does, or sends its trace with READS."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

KNOWN = {"max_tokens", "temperature"}
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        self.reads = "READS" in json.loads(args["model_config"])["parameters"]

    def execute(self, requests):
        for request in requests:
            parameters = json.loads(request.parameters() or "{}")
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)[0]
            if not self.reads and parameters.keys() - KNOWN:
                error = pb_utils.TritonError(f"unexpected parameters {sorted(parameters.keys() - KNOWN)}")
                response = pb_utils.InferenceResponse(error=error)
            else:
                shown = parameters.get("traceparent", "none").encode() if self.reads else text
                response = pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([shown], dtype=object))])
            request.get_response_sender().send(response, FINAL)
