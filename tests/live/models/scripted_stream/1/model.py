"""Responses as the script says, each request in a thread of its own.

The first input is a script in JSON, the first output a text. ``outputs`` (how many, default 3); ``interval_s`` between
them; ``texts`` (hexadecimal bytes, one a response, round and round); ``items`` (how many ids each response holds, by
index; the last one stays); ``bytes`` (of text a response); ``then``: ``final`` (default), ``final_with_last``,
``error``, ``silence`` (neither response nor end, until cancelled) or ``crash``; ``error`` {code, message, or
``signed``: a reason}; ``raise`` (a text); ``omit`` (outputs); ``notice`` (a file that is told when a cancellation was
seen, and how many responses were sent by then); ``journal`` (a file that gets a line "TOKEN received", then "TOKEN
answered", "TOKEN failed" or "TOKEN cancelled") and ``token``.
"""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from model_kit.signed_exit import key_of, signed_exit
from model_kit.streaming import send_final

# A Triton that many tests share has no key of its own; the gateway in front of it is given this one.
ENVIRONMENT = {"EARLY_EXIT_KEY": "the key of tests", **os.environ}


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.input, self.output = config["input"][0]["name"], config["output"][0]["name"]

    def execute(self, requests):
        for request in requests:
            script = json.loads(pb_utils.get_input_tensor_by_name(request, self.input).as_numpy()[0])
            script["output"] = self.output
            _note(script, "received")
            if "raise" in script:
                raise ValueError(script["raise"])
            sender, request_id = request.get_response_sender(), request.request_id()
            threading.Thread(target=_answer, args=(sender, script, request_id), daemon=True).start()


def _answer(sender, script, request_id):
    count = script.get("outputs", 3)
    then = script.get("then", "final")
    for index in range(count):
        if _waited_in_vain(sender, script, script.get("interval_s", 0.0), index):
            _note(script, "cancelled")
            send_final(sender)
            return
        response = _response(script, index)
        if then == "final_with_last" and index == count - 1:
            _note(script, "answered")
            send_final(sender, response)
            return
        sender.send(response)
    if then == "silence":
        _waited_in_vain(sender, script, 3600.0, count)
    if then == "crash":
        os._exit(1)
    _note(script, "answered" if then == "final" else "failed")
    if then == "error":
        error = script.get("error", {"code": "INTERNAL", "message": "scripted"})
        code = getattr(pb_utils.TritonError, error["code"])
        message = _text_of(error, request_id)
        send_final(sender, pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)))
    else:
        send_final(sender)


def _note(script, event):
    if "journal" in script:
        with Path(script["journal"]).open("a") as journal:
            journal.write(f"{script['token']} {event}\n")


def _text_of(error, request_id):
    if "signed" not in error:
        return error["message"]
    return str(signed_exit("scripted", error["signed"], request_id, key_of(ENVIRONMENT)))


def _waited_in_vain(sender, script, seconds, sent):
    """Whether the request was cancelled while waiting; polled every 5 ms, once at least."""
    ends = time.monotonic() + seconds
    while True:
        if sender.is_cancelled():
            if "notice" in script:
                Path(script["notice"]).write_text(f"{time.monotonic()} {sent}")
            return True
        if time.monotonic() >= ends:
            return False
        time.sleep(0.005)


def _response(script, index):
    if "bytes" in script:
        text = b"x" * script["bytes"]
    else:
        texts = script.get("texts", [b"word ".hex()])
        text = bytes.fromhex(texts[index % len(texts)])
    items = script.get("items", [1])
    ids = np.arange(items[min(index, len(items) - 1)], dtype=np.int32)
    tensors = [pb_utils.Tensor(script["output"], np.array([text], dtype=np.object_)), pb_utils.Tensor("TOKEN_ID", ids)]
    return pb_utils.InferenceResponse([each for each in tensors if each.name() not in script.get("omit", [])])
