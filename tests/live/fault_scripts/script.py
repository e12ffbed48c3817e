"""BLS: calls ``chain``, or the model ``child`` of SCRIPT, and returns its error; ``raises`` raises the error."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    tensor = pb_utils.get_input_tensor_by_name(request, "SCRIPT")
    script = json.loads(tensor.as_numpy()[0])
    call = pb_utils.InferenceRequest(
        model_name=script.get("child", "chain"), inputs=[tensor], requested_output_names=["Y"]
    )
    answer = call.exec()
    if not answer.has_error():
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "Y")])
    if script.get("raises"):
        raise pb_utils.TritonModelException(answer.error().message())
    return pb_utils.InferenceResponse(error=answer.error())
