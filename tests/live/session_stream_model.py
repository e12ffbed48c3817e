"""Adds the number of each step to the sum of its sequence ``COUNT`` times, and sends every sum.

``SLEEP`` is the time between two sums. A step that is cancelled stops, so the next sum shows that a step ran to its
end. A negative number fails before the last sum.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        self.states = {}

    def execute(self, requests):
        for request in requests:
            self._run(request)

    def _run(self, request):
        given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
        sequence, sender = request.correlation_id(), request.get_response_sender()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.states[sequence] = (0, 0)
        if sequence not in self.states:
            sender.send(_error("the sequence was never started here"), flags=FINAL)
            return
        total, steps = self.states[sequence]
        shape = (1,) * len(pb_utils.get_input_tensor_by_name(request, "NUMBER").shape())
        for number in range(int(given["COUNT"])):
            if sender.is_cancelled():
                break
            time.sleep(float(given.get("SLEEP", 0)) if number else 0)
            total += int(given["NUMBER"])
            outputs = {"SUM": total, "STEPS": steps + 1}
            if given["NUMBER"] >= 0 or number + 1 < given["COUNT"]:
                tensors = [pb_utils.Tensor(name, np.full(shape, value, np.int64)) for name, value in outputs.items()]
                sender.send(pb_utils.InferenceResponse(tensors))
        self.states[sequence] = (total, steps + 1)
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.states[sequence]
        if given["NUMBER"] < 0:
            sender.send(_error("the number is negative"), flags=FINAL)
        else:
            sender.send(flags=FINAL)


def _error(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
