"""A step rejects a tensor that violates the contract, with a message that the gateway can parse."""

import numpy as np
import pytest
from model_kit.contract import require_at_most, require_shape
from model_kit.outcomes import ContractBroken

from app.core.errors import Fault, FaultKind
from app.triton.grpc_errors import fault_in


def message_of(exc):
    return exc.value.text.format(model="post")


@pytest.mark.parametrize(("shape", "dims"), [((1,), [1]), ((7,), [-1]), ((0, 4, 2), [-1, 4, 2]), ((), [])])
def test_a_tensor_with_the_expected_shape_is_returned(shape, dims):
    tensor = np.zeros(shape)
    assert require_shape("IDS", tensor, dims) is tensor


@pytest.mark.parametrize(("shape", "dims"), [((2,), [1]), ((1, 1), [1]), ((0,), [-1, 4, 2]), ((3, 4, 1), [-1, 4, 2])])
def test_another_shape_is_rejected_with_the_message_of_triton(shape, dims):
    with pytest.raises(ContractBroken) as exc:
        require_shape("IDS", np.zeros(shape), dims)
    expected, seen = (str(list(each)).replace(" ", "") for each in (dims, shape))
    assert fault_in(message_of(exc)) == Fault(FaultKind.SHAPE, model="post", tensor="IDS", expected=expected, seen=seen)


@pytest.mark.parametrize("shape", [(0,), (3,), (4,), (2, 2)])
def test_a_tensor_within_the_limit_is_returned(shape):
    tensor = np.zeros(shape)
    assert require_at_most("IDS", tensor, 4) is tensor


@pytest.mark.parametrize(("shape", "seen"), [((5,), "[5]"), ((1, 8), "[1,8]"), ((3, 2), "[3,2]")])
def test_more_items_than_allowed_are_rejected(shape, seen):
    with pytest.raises(ContractBroken) as exc:
        require_at_most("IDS", np.zeros(shape), 4)
    assert message_of(exc) == f"too many items in input 'IDS' for model 'post'. Expected at most 4, got {seen}."
    assert fault_in(message_of(exc)) == Fault(FaultKind.ITEMS, model="post", tensor="IDS", expected="4", seen=seen)
