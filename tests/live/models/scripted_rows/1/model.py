"""Answers each row as its script defines it. A script that fails fails the request of its row.

Keys of SCRIPT (JSON):
    text: the value of TEXT.
    number: the value of both elements of the row of NUMBERS.
    omit: the outputs that the response does not have.
    error: {code, message}.
    sleep_s: the time before the response, the longest of the request.
    journal: a file to which the model adds "N rows", and "cancelled" if it sees a cancellation while it sleeps.
"""

import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    given = pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()
    scripts = [json.loads(row[0]) for row in given]
    _note(scripts, f"{len(scripts)} rows")
    _sleep(request, scripts)
    for script in scripts:
        if "error" in script:
            code = getattr(pb_utils.TritonError, script["error"]["code"])
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(script["error"]["message"], code))
    omitted = [name for script in scripts for name in script.get("omit", [])]
    return pb_utils.InferenceResponse([tensor for tensor in _tensors(scripts) if tensor.name() not in omitted])


def _sleep(request, scripts):
    ends = time.monotonic() + max(script.get("sleep_s", 0) for script in scripts)
    while time.monotonic() < ends:
        if request.is_cancelled():
            _note(scripts, "cancelled")
            return
        time.sleep(0.005)


def _note(scripts, event):
    for path in {script["journal"] for script in scripts if "journal" in script}:
        with Path(path).open("a") as journal:
            journal.write(f"{event}\n")


def _tensors(scripts):
    text = np.array([[script.get("text", "hello").encode()] for script in scripts], dtype=np.object_)
    numbers = np.array([[script.get("number", 0)] * 2 for script in scripts], dtype=np.float32)
    return [pb_utils.Tensor("TEXT", text), pb_utils.Tensor("NUMBERS", numbers)]
