"""INPUT -> OUTPUT, the same numbers."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([_output_of(request)]) for request in requests]


def _output_of(request):
    return pb_utils.Tensor("OUTPUT", pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy())
