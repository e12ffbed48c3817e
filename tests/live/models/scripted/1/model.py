"""Sends one response as the script in its input defines it.

Keys of SCRIPT (JSON):
    sleep_s: the time before the response.
    text, numbers: the values of TEXT and NUMBERS.
    shape: the shape of NUMBERS.
    omit: the outputs that the response does not have.
    error: {code, message}, or {code, signed: a reason, rid: a request id, by default that of the request}.
    raise: the text of an exception.
    notice: a file for the time when the model sees a cancellation.
    journal, token: a file to which the model adds "TOKEN received", then "TOKEN answered" or "TOKEN failed".
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from model_kit.signed_exit import key_of, signed_exit

# The Triton that tests share has no key in its environment; the gateways of the tests get the same default.
ENVIRONMENT = {"EARLY_EXIT_KEY": "the key of tests", **os.environ}


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        script = json.loads(pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()[0])
        _note(script, "received")
        self._sleep(request, script)
        _note(script, "failed" if "raise" in script or "error" in script else "answered")
        if "raise" in script:
            raise ValueError(script["raise"])
        if "error" in script:
            code = getattr(pb_utils.TritonError, script["error"]["code"])
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(_text_of(script["error"], request), code))
        return pb_utils.InferenceResponse(
            [tensor for tensor in _tensors(script) if tensor.name() not in script.get("omit", [])]
        )

    def _sleep(self, request, script):
        ends = time.monotonic() + script.get("sleep_s", 0)
        while time.monotonic() < ends:
            if "notice" in script and request.is_cancelled():
                Path(script["notice"]).write_text(str(time.monotonic()))
                return
            time.sleep(0.005)


def _note(script, event):
    if "journal" in script:
        with Path(script["journal"]).open("a") as journal:
            journal.write(f"{script['token']} {event}\n")


def _text_of(error, request):
    if "signed" not in error:
        return error["message"]
    return str(signed_exit("scripted", error["signed"], error.get("rid", request.request_id()), key_of(ENVIRONMENT)))


def _tensors(script):
    text = np.array([script.get("text", "hello").encode()], dtype=np.object_)
    numbers = np.array(script.get("numbers", [1.0, 2.0]), dtype=np.float32)
    return [
        pb_utils.Tensor("TEXT", text),
        pb_utils.Tensor("NUMBERS", numbers.reshape(script["shape"]) if "shape" in script else numbers),
    ]
