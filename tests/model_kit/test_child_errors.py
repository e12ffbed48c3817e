import pytest
from model_kit.child_errors import exception_of
from model_kit.outcomes import Cancelled, InvalidInput, Overloaded

FAULTS = {"IMAGE is truncated or corrupt"}


def test_a_known_text_is_the_callers_fault():
    assert isinstance(exception_of("IMAGE is truncated or corrupt", FAULTS), InvalidInput)


@pytest.mark.parametrize("message", ["x IMAGE is truncated or corrupt", "IMAGE is truncated or corrupt\n", "IMAGE", ""])
def test_a_text_that_only_resembles_it_is_not(message):
    assert isinstance(exception_of(message, FAULTS), RuntimeError)


def test_a_child_that_was_cancelled_is_cancelled():
    assert isinstance(exception_of("cancelled", FAULTS), Cancelled)


@pytest.mark.parametrize("message", ["[request id: 5] Exceeds maximum queue size", "Request timeout expired"])
def test_a_full_queue_below_is_overload(message):
    assert isinstance(exception_of(message, FAULTS), Overloaded)
