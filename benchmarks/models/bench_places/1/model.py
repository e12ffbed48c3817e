"""A continuous batcher without computation: a fixed number of places, and the same step time at any load.

The text of each response is the number of milliseconds that the stream waited for a place. All requests must name the
same number of places, as long as any of them runs.
"""

import queue
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
from model_kit.streaming import send_final

STEP_S = 0.05


class Stream:
    def __init__(self, request):
        numbers = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0])
            for name in ("PLACES", "FIRST_MS", "STEPS")
        )
        self.places, first_ms, self.left = numbers
        self.sender = request.get_response_sender()
        self.since = time.monotonic()
        self.waited_ms = 0
        self.silent_steps = max(round(first_ms / 1000 / STEP_S) - 1, 0)


class TritonPythonModel:
    def initialize(self, args):
        self.arrived = queue.SimpleQueue()
        threading.Thread(target=self._steps, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            self.arrived.put(Stream(request))

    def _steps(self):
        waiting, running = [], []
        due = time.monotonic()
        while True:
            due = max(due + STEP_S, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
            while not self.arrived.empty():
                waiting.append(self.arrived.get())
            while waiting and len(running) < waiting[0].places:
                running.append(waiting.pop(0))
                running[-1].waited_ms = round(1000 * (time.monotonic() - running[-1].since))
            running = [stream for stream in running if _goes_on(stream)]


def _goes_on(stream):
    """Sends the next response, unless the first one is not due. Returns whether others follow."""
    if stream.silent_steps:
        stream.silent_steps -= 1
        return True
    stream.left -= 1
    if stream.left == 0 or stream.sender.is_cancelled():
        send_final(stream.sender, _response(stream))
        return False
    stream.sender.send(_response(stream))
    return True


def _response(stream):
    return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([b"%d" % stream.waited_ms], dtype=np.object_))])
