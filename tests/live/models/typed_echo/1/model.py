"""Copies each input to an output: INPUT to INPUT_OUT. Copies BF16 through DLPack, because numpy has no BF16."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([_echo(tensor) for tensor in request.inputs()]) for request in requests]


def _echo(tensor):
    name = f"{tensor.name()}_OUT"
    if tensor.name() == "BF16":
        return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
    return pb_utils.Tensor(name, tensor.as_numpy())
