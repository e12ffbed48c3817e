"""INPUT -> OUTPUT, the same bytes, and FIRST, the first of them."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(_outputs_of(request)) for request in requests]


def _outputs_of(request):
    data = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
    outputs = {"OUTPUT": data, "FIRST": data[..., :1]}
    return [pb_utils.Tensor(name, outputs[name]) for name in request.requested_output_names()]
