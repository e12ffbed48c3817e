"""Copies each input to an output: INPUT to INPUT_OUT."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(list(map(_copied, request.inputs()))) for request in requests]


def _copied(tensor):
    return pb_utils.Tensor(f"{tensor.name()}_OUT", tensor.as_numpy())
