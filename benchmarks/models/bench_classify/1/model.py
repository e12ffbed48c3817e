"""CROP -> LABEL: the first value of each crop."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([_labels_of(request)]) for request in requests]


def _labels_of(request):
    crops = pb_utils.get_input_tensor_by_name(request, "CROP").as_numpy()
    return pb_utils.Tensor("LABEL", crops[:, 0, 0, :1].astype(np.int32))
