"""Sums the numbers of each sequence, by the id that Triton gives.

The outputs prove whose state a step had: the sum, and how many requests this sequence has had since its start.
``SLEEP`` makes a step slow. A negative number fails, after it was counted.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        self.states = {}

    def execute(self, requests):
        return [self._response(request) for request in requests]

    def _response(self, request):
        given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
        sequence = given.get("ID", request.correlation_id())
        if "ID" in given and _text(sequence) != _text(request.correlation_id()):
            return _error(f"the control input has another id than the request: {sequence}")
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.states[sequence] = (0, 0)
        if sequence not in self.states:
            return _error("the sequence was never started here")
        total, steps = self.states[sequence]
        total, steps = total + int(given["NUMBER"]), steps + 1
        self.states[sequence] = (total, steps)
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.states[sequence]
        time.sleep(float(given.get("SLEEP", 0)))
        if given["NUMBER"] < 0:
            return _error("the number is negative")
        outputs = {"SUM": total, "STEPS": steps, "OPEN": len(self.states)}
        shape = (1,) * len(pb_utils.get_input_tensor_by_name(request, "NUMBER").shape())
        tensors = [pb_utils.Tensor(name, np.full(shape, value, np.int64)) for name, value in outputs.items()]
        return pb_utils.InferenceResponse(tensors)


def _text(sequence):
    return sequence.decode() if isinstance(sequence, bytes) else str(sequence)


def _error(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
