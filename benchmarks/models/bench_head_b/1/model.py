"""FEATURES -> ANSWER, the first and the last of them, after a time that the request's parameters name.

``time_parameter`` of config.pbtxt says which of them: milliseconds to wait, as a GPU lets its caller wait, or with
``is_busy`` milliseconds of one core to spend.
"""

import json
import time

from model_kit.parameters import parameter_of
from model_kit.serving import answer_each, input_of


def spend(seconds):
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


class TritonPythonModel:
    def initialize(self, args):
        self._time_parameter = parameter_of(args, "time_parameter")

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        parameters = json.loads(request.parameters() or "{}")
        work = spend if parameters.get("is_busy") else time.sleep
        work(parameters.get(self._time_parameter, 0) / 1000)
        return {"ANSWER": input_of(request, "FEATURES")[[0, -1]]}
