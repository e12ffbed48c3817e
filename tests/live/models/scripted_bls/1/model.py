"""Calls ``scripted_chain`` with the same SCRIPT and request id, and returns its outputs or its error."""

import re

import triton_python_backend_utils as pb_utils

EXIT = re.compile(r"(in ensemble '\w+', )*(EARLY_EXIT\[\w+\]( page=\d+)?|EARLY_EXIT/1 [0-9a-f]{64} \{[^\n]*\})")


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    call = pb_utils.InferenceRequest(
        model_name="scripted_chain",
        inputs=request.inputs(),
        requested_output_names=["TEXT", "NUMBERS"],
        request_id=request.request_id(),
    )
    response = call.exec()
    if not response.has_error():
        return pb_utils.InferenceResponse(response.output_tensors())
    message = response.error().message()
    code = pb_utils.TritonError.ALREADY_EXISTS if EXIT.fullmatch(message) else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
