"""The models of `test_step_faults.py`. The name of a model says what it does.

- `ident` and `batch_ident` copy X to Y.
- `writer`, `batch_writer`, `stream_writer` return T as SCRIPT (JSON) defines it: ``omit`` (T), ``shape``, ``float64``,
  ``count`` of responses, ``error`` [code, text]. `stream_writer` sends two responses; ``returns`` returns them instead,
  which is an error for decoupled models.
- `script` and `declared_script` (BLS) call ``chain`` or the model ``child`` of SCRIPT, and return its error; ``raises``
  raises the error.
- `sender` is not decoupled and sends its response with a response sender: Triton marks no end of a stream.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        name = json.loads(args["model_config"])["name"]
        self.execute_all = {"sender": _send, "stream_writer": _stream}.get(name)
        self.answers = _copies if name.endswith("ident") else _calls if name.endswith("script") else _writes

    def execute(self, requests):
        if self.execute_all is not None:
            return self.execute_all(requests)
        return [answer for request in requests for answer in self.answers(request)]


def _script_of(request):
    return json.loads(pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy().item())


def _copies(request):
    tensor = pb_utils.get_input_tensor_by_name(request, "X")
    return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor.as_numpy())])]


def _writes(request):
    script = _script_of(request)
    if "error" in script:
        code, text = script["error"]
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text, getattr(pb_utils.TritonError, code)))]
    dtype = np.float64 if script.get("float64") else np.float32
    tensor = pb_utils.Tensor("T", np.zeros(script.get("shape", [1, 3, 4]), dtype))
    return [pb_utils.InferenceResponse([] if script.get("omit") else [tensor])] * script.get("count", 1)


def _stream(requests):
    for request in requests:
        (answer,) = _writes(request)
        if _script_of(request).get("returns"):
            return [answer]
        sender = request.get_response_sender()
        sender.send(answer)
        sender.send(answer, flags=FINAL)
    return None


def _send(requests):
    for request in requests:
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros((1, 3, 4), np.float32))])
        request.get_response_sender().send(answer, flags=FINAL)


def _calls(request):
    script = _script_of(request)
    call = pb_utils.InferenceRequest(
        model_name=script.get("child", "chain"),
        inputs=[pb_utils.get_input_tensor_by_name(request, "SCRIPT")],
        requested_output_names=["Y"],
    )
    answer = call.exec()
    if not answer.has_error():
        return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "Y")])]
    if script.get("raises"):
        raise pb_utils.TritonModelException(answer.error().message())
    return [pb_utils.InferenceResponse(error=answer.error())]
