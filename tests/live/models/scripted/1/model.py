"""Sends one response, as defined by the script in its input.

SCRIPT is JSON: ``sleep_s``; ``error`` {code, message, or ``signed``: a reason, and perhaps ``rid``}; ``raise`` (a
text); ``crash`` (true); ``omit`` (outputs); ``text``; ``numbers``; ``shape`` (of NUMBERS); ``notice`` (a file that is
told when a cancellation was seen); ``journal`` (a file that gets a line "TOKEN received", then "TOKEN answered" or
"TOKEN failed") and ``token``.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from model_kit.signed_exit import key_of, signed_exit

# A Triton that many tests share has no key of its own; the gateway in front of it is given this one.
ENVIRONMENT = {"EARLY_EXIT_KEY": "the key of tests", **os.environ}


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        script = json.loads(pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()[0])
        _note(script, "received")
        self._sleep(request, script)
        if "crash" in script:
            os._exit(1)
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
