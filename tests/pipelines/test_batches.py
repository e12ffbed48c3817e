"""The parts of a batch, and their joined answer, without a server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from msgspec.structs import replace

from app.config.mismatch import PipelineMismatch
from app.core.answer import BatchPart, PartEnd, part_of
from app.core.errors import ContractViolation, ModelChanged
from app.core.inference import Array, InferenceResponse, Tensor
from app.core.model import Step
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import PipelineBatch
from tests.toolkit.models import model, pipeline, response, tensor


def doubling(**batch: Any) -> Pipeline:
    return pipeline(model("X FP32 [2]", "Y FP32 [2]", max_batch_size=4), batch=batch or True)


def batch_of(p: Pipeline, count: int) -> PipelineBatch:
    body = orjson.dumps({"X": [[i, -i] for i in range(count)]})
    return PipelineBatch(p, p.request_of_json(body), is_whole=True)


def echo(sent: Tensor, version: str = "1") -> InferenceResponse:
    return InferenceResponse({"Y": Tensor("Y", sent.datatype, sent.array)}, version=version)


def answered(batch: PipelineBatch, part: BatchPart, answer: InferenceResponse) -> None:
    """The part has this response, and ends."""
    batch.add(replace(answer, choice=part.items.start))
    batch.add(PartEnd({}, choice=part.items.start))


def test_parts_that_end_in_another_order_are_joined_in_the_order_of_the_items() -> None:
    batch = batch_of(doubling(), 10)
    for part in reversed(list(batch.parts())):
        answered(batch, part, echo(part.request.inputs[0]))
    assert [int(row[0]) for row in batch.finish().outputs[0]["Y"]] == list(range(10))


def test_a_part_has_views_of_the_arrays_and_its_own_id() -> None:
    p = doubling()
    request = p.request_of_json(orjson.dumps({"X": [[i, i] for i in range(6)]}))
    first, second = (part_of(request, items) for items in (range(4), range(4, 6)))
    assert (first.request_id, first.inputs[0].shape) == (request.request_id, (4, 2))
    assert second.request_id != request.request_id
    assert np.shares_memory(second.inputs[0].array, request.inputs[0].array)


def test_a_parameter_tensor_is_split_too() -> None:
    config = model(["X FP32 [1]", "K INT32 [1]"], "Y FP32 [1]", max_batch_size=2)
    p = pipeline(config, batch=True, parameters={"k": {"type": "integer", "tensor": "K"}})
    batch = PipelineBatch(p, p.request_of_json(b'{"X": [1, 2, 3], "k": 5}'), is_whole=True)
    assert [part.request.inputs[1].array.tolist() for part in batch.parts()] == [[[5], [5]], [[5]]]


@pytest.mark.parametrize(("count", "name"), [(8, "items[4..7]"), (5, "items[4]")])
def test_all_parts_must_have_one_version(count: int, name: str) -> None:
    batch = batch_of(doubling(), count)
    first, second = batch.parts()
    answered(batch, first, echo(first.request.inputs[0]))
    with pytest.raises(ModelChanged, match="versions 1 and 2") as caught:
        answered(batch, second, echo(second.request.inputs[0], version="2"))
    assert caught.value.retryable
    assert [each.field for each in caught.value.errors] == [name]


@pytest.mark.parametrize("rows", [0, 3, 5])
def test_a_part_with_other_rows_is_a_violation_that_names_the_output(rows: int) -> None:
    batch = batch_of(doubling(), 8)
    part = next(batch.parts())
    with pytest.raises(ContractViolation, match=f"'Y' has {rows} rows for 4 items"):
        answered(batch, part, response(tensor("Y", "FP32", np.zeros((rows, 2)))))


@pytest.mark.parametrize("written", [lambda rows: rows[:, 0], lambda rows: rows[None], lambda rows: rows.squeeze()])
def test_rows_without_their_dimension_of_size_1_are_joined(written: Callable[[Array], Array]) -> None:
    p = pipeline(model("X FP32 [1]", "Y FP32 [1]", max_batch_size=2), batch=True)
    batch = PipelineBatch(p, p.request_of_json(b'{"X": [1, 2, 3]}'), is_whole=True)
    for part in batch.parts():
        answered(batch, part, response(tensor("Y", "FP32", written(part.request.inputs[0].array))))
    assert [float(each) for each in batch.finish().outputs[0]["Y"]] == [1, 2, 3]


def test_rows_without_elements_are_empty_lists() -> None:
    p = pipeline(model("X FP32 [1]", "Y FP32 [-1]", max_batch_size=2), batch=True)
    batch = PipelineBatch(p, p.request_of_json(b'{"X": [1, 2, 3]}'), is_whole=True)
    for part in batch.parts():
        answered(batch, part, response(tensor("Y", "FP32", np.zeros((len(part.items), 0)))))
    assert batch.finish().outputs == [{"Y": [[], [], []]}]


def test_one_part_is_not_copied() -> None:
    batch = batch_of(doubling(), 4)
    (part,) = batch.parts()
    answered(batch, part, echo(part.request.inputs[0]))
    assert np.shares_memory(batch.finish().outputs[0]["Y"], part.request.inputs[0].array)


@pytest.mark.parametrize(("sizes", "exit_of_all"), [((0, 1), None), ((1, 0), None), ((0, 0), "nothing")])
def test_a_request_is_an_early_exit_if_each_item_is(sizes: tuple[int, ...], exit_of_all: str | None) -> None:
    rules = [{"reason": "nothing", "empty": ["Y"]}]
    p = pipeline(model("X FP32 [1]", "Y FP32 [-1]", max_batch_size=2), batch={"parts": 1}, early_exit=rules)
    batch = PipelineBatch(p, p.request_of_json(b'{"X": [1, 2]}'), is_whole=True)
    for part, size in zip(batch.parts(), sizes, strict=True):
        answered(batch, part, response(tensor("Y", "FP32", np.ones((1, size)))))
    ending = batch.finish()
    assert (ending.early_exit, ending.early_exits) == (exit_of_all, [None if size else "nothing" for size in sizes])


STEPS = [model("X FP32 [2]", "Y FP32 [2]", name=f"of_{size}", max_batch_size=size) for size in (8, 3, 0)]
CALLED = tuple(Step(each.name, "", (("X", "X"),), (("Y", "Y"),)) for each in STEPS)


@pytest.mark.parametrize(
    ("keys", "batch", "items"),
    [
        ({"max_batch_size": 4}, True, 4),
        ({"max_batch_size": 4}, {"parts": 3}, 3),
        ({"max_batch_size": 4, "decoupled": True}, True, 1),
        ({"max_batch_size": 16, "backend": "ensemble", "steps": CALLED}, True, 3),  # those of its smallest step
    ],
    ids=["what the model takes", "parts", "decoupled", "ensemble"],
)
def test_the_size_of_parts(keys: dict[str, Any], batch: Any, items: int) -> None:
    assert pipeline(model("X FP32 [2]", "Y FP32 [2]", **keys), *STEPS, batch=batch).call_items == items


def test_parts_above_the_models_limit_do_not_match() -> None:
    with pytest.raises(PipelineMismatch, match="is 5, and the model takes 4 items at a time") as caught:
        doubling(parts=5)
    assert caught.value.location == ("batch", "parts")
