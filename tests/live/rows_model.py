"""Answers the item i with -i and the text "of i", or has the habit of a hostile model, which its configuration names.

A hostile habit concerns only batches of several rows, except lists of detections; one that begins with ``late_`` only
those with an item of 1,000 or more, so that no sample shows it. ``flat`` and ``squeeze`` write fewer dimensions than
are declared.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

BAD, KILLER = 13, 666
LATE = 1000
SERVICE_S = 0.002


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        self.habit = json.loads(args["model_config"])["parameters"]["habit"]["string_value"]
        self.killed = Path(args["model_repository"]) / "killed"
        self.killed.touch()

    def execute(self, requests):
        time.sleep(SERVICE_S)
        return [self._response(request) for request in requests]

    def _response(self, request):
        items = pb_utils.get_input_tensor_by_name(request, "ITEM").as_numpy()
        if KILLER in items:
            with self.killed.open("a") as killed:
                killed.write("killed\n")
            os._exit(1)
        if BAD in items:
            error = pb_utils.TritonError(f"item {BAD} of {items.reshape(-1).tolist()} is bad")
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse(self._outputs(items))

    def _outputs(self, items):
        negative, habit = -items, self.habit
        text = np.array([[b"of %d" % item] for item in items[:, 0]], np.object_)
        is_hostile = len(items) > 1 and (not habit.startswith("late_") or items.max() >= LATE)
        what = habit.removeprefix("late_") if is_hostile else "good"
        if what == "drop":
            negative = negative[:-1]
        elif what == "extra":
            negative = np.concatenate([negative, negative[:1]])
        elif what == "repeat":
            negative = negative.copy()
            negative[1] = negative[0]
        if habit in ("flat", "squeeze"):
            negative, text = (each[:, 0] if habit == "flat" else each.squeeze() for each in (negative, text))
        outputs = [pb_utils.Tensor("NEGATIVE", negative)]
        if what != "omit":
            outputs.append(pb_utils.Tensor("TEXT", text))
        if habit == "list":
            outputs.append(_boxes(list(enumerate(items[:, 0]))))
        elif habit == "late_list":
            outputs.append(_boxes([(item, item) for item in items[:, 0] for _ in range(_detections_in(item))]))
        return outputs


def _detections_in(item):
    """One before the late items, then two or none: as many as items by accident."""
    return 1 if item < LATE else 2 * (item % 2 == 0)


def _boxes(pairs):
    return pb_utils.Tensor("BOXES", np.array(pairs, np.int64).reshape(-1, 2))
