"""A language model without computation: one step each 2 ms writes a token of every running stream.

The flags for further outputs are read as NVIDIA's vLLM backend reads them.
"""

import json
import queue
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
from model_kit.streaming import send_final

STEP_S = 0.002
COUNTS = ("num_input_tokens", "num_output_tokens")


class Stream:
    def __init__(self, request):
        sampling = pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()[0]
        self.left = json.loads(sampling)["max_tokens"]
        self.sender = request.get_response_sender()
        self.counts = [name for name in COUNTS if _is_set(request, f"return_{name}")]
        self.has_reason = _is_set(request, "return_finish_reason")


class TritonPythonModel:
    def initialize(self, args):
        self.arrived = queue.SimpleQueue()
        threading.Thread(target=self._steps, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            self.arrived.put(Stream(request))

    def _steps(self):
        running, due = [], time.monotonic()
        while True:
            if not running:
                running.append(self.arrived.get())
            due = max(due + STEP_S, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
            while not self.arrived.empty():
                running.append(self.arrived.get())
            running = [stream for stream in running if _goes_on(stream)]


def _goes_on(stream):
    """Sends the next token. Returns whether others follow."""
    stream.left -= 1
    if stream.left == 0 or stream.sender.is_cancelled():
        send_final(stream.sender, _response(stream))
        return False
    stream.sender.send(_response(stream))
    return True


def _response(stream):
    outputs = [_text("text_output", b" word")]
    if stream.has_reason:
        outputs.append(_text("finish_reason", b"None" if stream.left else b"length"))
    outputs += [pb_utils.Tensor(name, np.array([1], np.uint32)) for name in stream.counts]
    return pb_utils.InferenceResponse(outputs)


def _text(name, value):
    return pb_utils.Tensor(name, np.array([value], np.object_))


def _is_set(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and bool(tensor.as_numpy()[0])
