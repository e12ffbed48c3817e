"""Sums the numbers of each sequence, by the id that Triton gives.

The outputs prove whose state a step had: the sum, and how many steps this sequence has had since its start. ``SLEEP``
makes a step slow. A negative number fails, after it was counted.

A decoupled model adds the number ``COUNT`` times, and sends every sum; ``SLEEP`` is the time between two sums. A step
that is cancelled stops, so the next sum shows that a step ran to its end. A negative number fails before the last sum.
"""

import json
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
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        if not self.is_decoupled:
            return [response for request in requests for response in self._responses(request, lambda: False)]
        for request in requests:
            sender, flags = request.get_response_sender(), 0
            for response in self._responses(request, sender.is_cancelled):
                flags = FINAL if response.has_error() else 0
                sender.send(response, flags=flags)
            if not flags:
                sender.send(flags=FINAL)
        return None

    def _responses(self, request, is_cancelled):
        given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
        sequence = given.get("ID", request.correlation_id())
        if "ID" in given and _text(sequence) != _text(request.correlation_id()):
            yield _error(f"the control input has another id than the request: {sequence}")
            return
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.states[sequence] = (0, 0)
        if sequence not in self.states:
            yield _error("the sequence was never started here")
            return
        total, steps = self.states[sequence]
        shape = (1,) * len(pb_utils.get_input_tensor_by_name(request, "NUMBER").shape())
        count = int(given.get("COUNT", 1))
        for number in range(count):
            if is_cancelled():
                break
            if number or "COUNT" not in given:
                time.sleep(float(given.get("SLEEP", 0)))
            total += int(given["NUMBER"])
            if given["NUMBER"] >= 0 or number + 1 < count:
                outputs = {"SUM": total, "STEPS": steps + 1}
                if not self.is_decoupled:
                    outputs["OPEN"] = len(self.states)
                tensors = [pb_utils.Tensor(name, np.full(shape, value, np.int64)) for name, value in outputs.items()]
                yield pb_utils.InferenceResponse(tensors)
        self.states[sequence] = (total, steps + 1)
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.states[sequence]
        if given["NUMBER"] < 0:
            yield _error("the number is negative")


def _text(sequence):
    return sequence.decode() if isinstance(sequence, bytes) else str(sequence)


def _error(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
