"""Sends responses as the script in its first input defines them, in one thread for each request.

The first output is a text. Keys of the script (JSON):
    outputs: the number of responses, 3 by default.
    interval_s: the time before each response.
    texts: hexadecimal bytes for each response; the model repeats the list.
    bytes: the size of the text of each response, instead of texts; of a list, the model repeats the sizes.
    items: the number of token ids of each response; the last number applies to all later responses.
    omit: the outputs that the responses do not have.
    then: what follows the responses: final (default), final_with_last, error, or silence until a cancellation.
    error: {code, message}, or {code, signed: a reason}.
    raise: the text of an exception.
    notice: a file for the time when the model sees a cancellation and the number of responses sent before.
    journal, token: a file to which the model adds "TOKEN received", then "TOKEN answered", "TOKEN failed" or
        "TOKEN cancelled".
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

# The Triton that tests share has no key in its environment; the gateways of the tests get the same default.
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
        if _is_cancelled_within(sender, script, script.get("interval_s", 0.0), index):
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
        _is_cancelled_within(sender, script, 3600.0, count)
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


def _is_cancelled_within(sender, script, seconds, sent):
    """Waits, and returns whether the request was cancelled. Polls every 5 ms, and at least once."""
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
        sizes = script["bytes"] if isinstance(script["bytes"], list) else [script["bytes"]]
        text = b"x" * sizes[index % len(sizes)]
    else:
        texts = script.get("texts", [b"word ".hex()])
        text = bytes.fromhex(texts[index % len(texts)])
    items = script.get("items", [1])
    ids = np.arange(items[min(index, len(items) - 1)], dtype=np.int32)
    tensors = [pb_utils.Tensor(script["output"], np.array([text], dtype=np.object_)), pb_utils.Tensor("TOKEN_ID", ids)]
    return pb_utils.InferenceResponse([each for each in tensors if each.name() not in script.get("omit", [])])
