import json
import time

import pytest
from model_kit.deadline import PARAMETER, deadline_check
from model_kit.outcomes import Cancelled


class Request:
    def __init__(self, **parameters):
        self._parameters = parameters

    def parameters(self):
        return json.dumps(self._parameters)


def test_after_the_deadline_the_work_is_cancelled():
    with pytest.raises(Cancelled):
        deadline_check(Request(**{PARAMETER: time.time() * 1000 - 1}))()


def test_work_continues_before_the_deadline_and_without_one():
    deadline_check(Request(**{PARAMETER: time.time() * 1000 + 10_000}))()
    deadline_check(Request())()
