import pytest
from model_kit.child_errors import exception_of
from model_kit.outcomes import Cancelled, InvalidInput, Overloaded

FAULTS = {"IMAGE is truncated or corrupt"}


def test_a_known_message_is_invalid_input():
    assert isinstance(exception_of("IMAGE is truncated or corrupt", FAULTS), InvalidInput)


@pytest.mark.parametrize("message", ["x IMAGE is truncated or corrupt", "IMAGE is truncated or corrupt\n", "IMAGE", ""])
def test_a_similar_message_is_a_runtime_error(message):
    assert isinstance(exception_of(message, FAULTS), RuntimeError)


def test_a_cancelled_child_raises_cancelled():
    assert isinstance(exception_of("cancelled", FAULTS), Cancelled)


@pytest.mark.parametrize("message", ["[request id: 5] Exceeds maximum queue size", "Request timeout expired"])
def test_a_full_queue_of_a_child_raises_overloaded(message):
    assert isinstance(exception_of(message, FAULTS), Overloaded)
