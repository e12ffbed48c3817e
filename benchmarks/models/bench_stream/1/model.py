"""A generator without computation, to measure the cost of a stream without its model.

Request parameters: ``interval_ms`` between responses (default 0), ``notice`` (a file for the time when the
model detected that its caller had disconnected, in monotonic seconds).
"""

import json
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from model_kit.streaming import send_final

POLL_S = 0.002
POLLS = 1_000
"""Most looks in one interval: thousands of idle streams are to leave the processor idle."""


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            wishes = json.loads(request.parameters() or "{}")
            threading.Thread(target=_answer, args=(request.get_response_sender(), count, wishes), daemon=True).start()


def _answer(sender, count, wishes):
    text = pb_utils.Tensor("TEXT", np.array([b"word "], dtype=np.object_))
    interval_s = int(wishes.get("interval_ms", 0)) / 1000
    for index in range(count):
        if _left(sender, interval_s):
            if "notice" in wishes:
                Path(wishes["notice"]).write_text(repr(time.monotonic()))
            break
        sender.send(pb_utils.InferenceResponse([text, pb_utils.Tensor("TOKEN_ID", np.array([index], dtype=np.int32))]))
    send_final(sender)


def _left(sender, interval_s):
    """Waits, and says whether the caller has gone; one look where there is nothing to wait for."""
    ends = time.monotonic() + interval_s
    while not sender.is_cancelled():
        if time.monotonic() >= ends:
            return False
        time.sleep(max(POLL_S, interval_s / POLLS))
    return True
