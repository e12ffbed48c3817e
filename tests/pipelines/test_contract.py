"""A contract violation, such as a growing token, is found at the first response that has it."""

import numpy as np
import pytest

from app.core.errors import ContractViolation
from app.core.inference import InferenceResponse, Tensor
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.outputs import ContractCheck
from app.pipelines.run import Collector
from app.pipelines.spec import ContractSpec
from tests.toolkit.models import model, pipeline, response


def of_shape(*shape: int) -> InferenceResponse:
    return response(Tensor("T", "INT32", np.zeros(shape, np.int32)))


def failing_at(contract: ContractSpec, *responses: InferenceResponse, takes_batch: bool = False) -> int:
    """Returns the index of the first response that violates the contract, or -1."""
    check = ContractCheck({"T": contract}, takes_batch=takes_batch)
    for place, each in enumerate(responses):
        try:
            check.check(each)
        except ContractViolation:
            return place
    return -1


def test_max_items_limits_the_items_of_each_response() -> None:
    contract = ContractSpec(max_items=2)
    assert failing_at(contract, of_shape(1), of_shape(2), of_shape(0), of_shape(3)) == 3
    assert failing_at(contract, of_shape(1, 2), of_shape(2, 2)) == 1


def test_shape_must_match_each_response() -> None:
    assert failing_at(ContractSpec(shape=[-1, 2]), of_shape(5, 2), of_shape(0, 2), of_shape(2, 3)) == 2
    assert failing_at(ContractSpec(shape=[1]), of_shape(1, 2)) == 0


def test_the_shape_is_that_of_the_tensor_as_declared() -> None:
    """Dimensions of size 1 may be missing or extra, as in the value for the caller."""
    assert failing_at(ContractSpec(shape=[1]), of_shape(1, 1), of_shape(), of_shape(2)) == 2
    assert failing_at(ContractSpec(shape=[5]), of_shape(5), of_shape(1, 5), of_shape(4), takes_batch=True) == 2


def test_the_shape_excludes_the_batch_dimension() -> None:
    contract = ContractSpec(shape=[1])
    assert failing_at(contract, of_shape(1, 1), of_shape(1, 2), takes_batch=True) == 1
    assert failing_at(contract, of_shape(2, 1), takes_batch=True) == 0


def test_a_contract_may_have_other_dimensions_of_size_1_than_the_model() -> None:
    p = pipeline(model([], "T INT32 [2]", max_batch_size=4), contract={"T": {"shape": [1, 2]}})
    assert Collector(p, p.request_of_json(b"{}")).add(of_shape(2)) is not None
    with pytest.raises(PipelineMismatch, match=r"is \[1,3\], and the model's output 'T' is \[2\]"):
        pipeline(model([], "T INT32 [2]"), contract={"T": {"shape": [1, 3]}})


def test_not_growing_compares_with_the_first_response() -> None:
    contract = ContractSpec(not_growing=True)
    assert failing_at(contract, of_shape(2), of_shape(1), of_shape(2), of_shape(3)) == 3


def test_responses_without_the_tensor_are_ignored() -> None:
    contract = ContractSpec(max_items=0, shape=[1], not_growing=True)
    assert failing_at(contract, response(), InferenceResponse({})) == -1


def test_the_detail_has_the_actual_and_the_declared_size() -> None:
    with pytest.raises(ContractViolation) as caught:
        ContractCheck({"T": ContractSpec(max_items=1)}).check(of_shape(2))
    assert caught.value.tensor == "T"
    assert caught.value.detail == "Output 'T' has shape [2]; the contract allows at most 1 items."
    assert "only items that are new" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("shape", "takes_batch", "seen", "detail"),
    [
        ([5], False, (2, 5), "has shape [2,5]; the contract requires [5]."),
        ([1, 5], True, (2, 5), "has shape [2,5]; the contract requires [1,1,5] with the batch dimension."),
        ([5], True, (2, 5), "has shape [2,5]; the contract requires [1,5] with the batch dimension."),
    ],
)
def test_a_shape_violation_names_both_shapes(
    shape: list[int], *, takes_batch: bool, seen: tuple[int, ...], detail: str
) -> None:
    with pytest.raises(ContractViolation) as caught:
        ContractCheck({"T": ContractSpec(shape=shape)}, takes_batch=takes_batch).check(of_shape(*seen))
    assert caught.value.detail == f"Output 'T' {detail}"
    assert caught.value.hint is None


def test_a_parameter_of_the_request_may_be_the_limit() -> None:
    p = pipeline(
        model([], "T INT32 [-1]", max_batch_size=4),
        parameters={"chunk": {"type": "integer", "default": 1}},
        contract={"T": {"max_items": "chunk", "shape": [-1]}},
    )
    collector = Collector(p, p.request_of_json(b'{"chunk": 2}'))
    collector.add(of_shape(1, 2))
    with pytest.raises(ContractViolation, match="at most 2"):
        collector.add(of_shape(1, 3))
    with pytest.raises(ContractViolation, match="at most 1"):
        Collector(p, p.request_of_json(b"{}")).add(of_shape(1, 2))


def test_an_absent_optional_limit_has_no_effect() -> None:
    p = pipeline(
        model([], "T INT32 [-1]"),
        parameters={"chunk": {"type": "integer", "optional": True}},
        contract={"T": {"max_items": "chunk"}},
    )
    assert Collector(p, p.request_of_json(b"{}")).add(of_shape(100)) is not None
