"""Copies X to Y."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    tensor = pb_utils.get_input_tensor_by_name(request, "X")
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor.as_numpy())])
