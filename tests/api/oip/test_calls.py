"""``infer`` and ``generate`` answer with exactly one response."""

import pytest

from app.api.oip.oip_endpoints import OneResponse
from app.core.errors import InvalidRequest, ModelError
from app.core.inference import InferenceResponse
from tests.toolkit.models import response, tensor

FULL, EMPTY = response(tensor("Y", "INT32", [1])), InferenceResponse({})


@pytest.mark.parametrize(
    ("decoupled", "responses"), [(True, [FULL]), (True, [EMPTY, FULL, EMPTY]), (False, [FULL]), (False, [EMPTY])]
)
def test_the_only_response_is_the_answer(decoupled: bool, responses: list[InferenceResponse]) -> None:
    answer = OneResponse(decoupled=decoupled)
    for each in responses:
        answer.add(each)
        assert not answer.has_enough
    answer.finish()
    assert answer.responses == [FULL if FULL in responses else EMPTY]


def test_a_second_response_ends_the_call() -> None:
    answer = OneResponse(decoupled=True)
    answer.add(FULL)
    answer.add(FULL)
    assert answer.has_enough
    with pytest.raises(InvalidRequest):
        answer.finish()


def test_no_response_with_outputs_is_refused() -> None:
    answer = OneResponse(decoupled=True)
    answer.add(EMPTY)
    with pytest.raises(InvalidRequest):
        answer.finish()


def test_an_error_of_the_model_is_raised_unchanged() -> None:
    with pytest.raises(ModelError):
        OneResponse(decoupled=True).finish(ModelError("no"))
