"""Returns the text and the number of images."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([_answer_to(request)]) for request in requests]


def _answer_to(request):
    text, images = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("TEXT", "IMAGES"))
    return pb_utils.Tensor("ANSWER", np.array([b"%b: %d images" % (text[0], len(images))], np.object_))
