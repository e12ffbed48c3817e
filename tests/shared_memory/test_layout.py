"""The layout selects the tensors of a call that use shared memory."""

from collections.abc import Sequence

import numpy as np
import pytest

from app.core.inference import BYTES, InferenceRequest, RequestedOutput, Tensor, bytes_array
from app.core.model import ModelConfig, Step, TensorSpec
from app.shared_memory.regions import LARGE_BYTES, ByteRange, Layout, Layouts
from app.triton.connect import MAX_MESSAGE_BYTES

LARGE = LARGE_BYTES // 4


def numbers(count: int = LARGE, name: str = "X") -> Tensor:
    return Tensor(name, "FP32", np.zeros(count, np.float32))


def model(
    name: str = "m",
    *outputs: TensorSpec,
    max_batch_size: int = 0,
    steps: tuple[Step, ...] = (),
    decoupled: bool = False,
) -> ModelConfig:
    inputs = (TensorSpec("X", "FP32", (-1,)), TensorSpec("NOTE", "FP32", (-1,)))
    return ModelConfig(name, "python", max_batch_size, inputs, outputs, steps=steps, decoupled=decoupled)


def layout(*configs: ModelConfig, inputs: tuple[Tensor, ...] = (numbers(),)) -> Layout | None:
    layouts = Layouts(MAX_MESSAGE_BYTES)
    for config in configs:
        layouts.learn(config, "")
    return layouts.layout_of(InferenceRequest("m", inputs))


FILE = Tensor("X", BYTES, bytes_array([b"a" * LARGE_BYTES], (1,)))


@pytest.mark.parametrize(
    ("inputs", "places", "size"),
    [
        ([numbers()], [(0, LARGE_BYTES)], LARGE_BYTES),
        ([numbers(1, "NOTE"), numbers()], [None, (0, LARGE_BYTES)], LARGE_BYTES),
        (
            [numbers(LARGE + 1), numbers(LARGE, "NOTE")],
            [(0, LARGE_BYTES + 4), (LARGE_BYTES + 64, LARGE_BYTES)],
            2 * LARGE_BYTES + 64,
        ),
        ([FILE], [(0, LARGE_BYTES + 4)], LARGE_BYTES + 4),
    ],
    ids=["a large input", "only the large one of two", "aligned", "bytes with their lengths"],
)
def test_large_inputs_have_a_place(inputs: list[Tensor], places: list[tuple[int, int] | None], size: int) -> None:
    ranges = tuple(place and ByteRange(*place) for place in places)
    assert layout(model(), inputs=tuple(inputs)) == Layout(ranges, (), size)


@pytest.mark.parametrize(
    ("models", "inputs"),
    [
        ([model()], [numbers(LARGE - 1)]),
        ([model()], [Tensor("X", BYTES, bytes_array([b"a" * LARGE_BYTES] * 65, (65,)))]),
        ([], [numbers()]),
        ([model()], [numbers(MAX_MESSAGE_BYTES // 4), numbers(LARGE, "NOTE")]),
    ],
    ids=["small", "many elements of bytes", "an unknown model", "too large for Triton, which rejects it"],
)
def test_these_requests_use_grpc(models: list[ModelConfig], inputs: list[Tensor]) -> None:
    assert layout(*models, inputs=tuple(inputs)) is None


class TestOutputs:
    def test_an_output_of_fixed_size_has_a_place(self) -> None:
        found = layout(model("m", TensorSpec("Y", "FP64", (LARGE,)), TensorSpec("Z", "FP32", (1,))), inputs=())
        assert found == Layout((), (("Y", ByteRange(0, 2 * LARGE_BYTES)), ("Z", None)), 2 * LARGE_BYTES)

    def test_only_requested_outputs_have_a_place(self) -> None:
        layouts = Layouts(MAX_MESSAGE_BYTES)
        layouts.learn(model("m", TensorSpec("Y", "FP32", (LARGE,)), TensorSpec("Z", "FP32", (LARGE,))), "")
        for outputs, named in (
            ((RequestedOutput("Z"),), (("Z", ByteRange(0, LARGE_BYTES)),)),
            ((RequestedOutput("Y"), RequestedOutput("Z", 3)), (("Y", ByteRange(0, LARGE_BYTES)), ("Z", None))),
        ):
            found = layouts.layout_of(InferenceRequest("m", (numbers(1),), outputs=outputs))
            assert found == Layout((None,), named, LARGE_BYTES)
        assert layouts.layout_of(InferenceRequest("m", (numbers(1),), outputs=(RequestedOutput("Z", 3),))) is None

    def test_outputs_of_an_unknown_model_use_grpc(self) -> None:
        request = InferenceRequest("m", (numbers(1),), version="1", outputs=(RequestedOutput("Y"),))
        assert Layouts(MAX_MESSAGE_BYTES).layout_of(request) is None

    def test_an_output_has_room_for_each_item_of_the_batch(self) -> None:
        batch = Tensor("X", "FP32", np.zeros((3, 1), np.float32))
        found = layout(model("m", TensorSpec("Y", "FP32", (LARGE,)), max_batch_size=4), inputs=(batch,))
        assert found is not None
        assert found.outputs == (("Y", ByteRange(0, 3 * LARGE_BYTES)),)

    @pytest.mark.parametrize(
        "spec", [TensorSpec("Y", "FP32", (-1, LARGE)), TensorSpec("Y", BYTES, (LARGE,)), TensorSpec("Y", "INVALID", ())]
    )
    def test_an_output_of_unknown_size_uses_grpc(self, spec: TensorSpec) -> None:
        assert layout(model("m", spec), inputs=()) is None


def step(name: str, reads: str, writes: str) -> Step:
    return Step(name, "", tuple((each, each) for each in reads.split()), tuple((each, each) for each in writes.split()))


FAN_OUT = (step("a", "X", "M"), step("b", "M", "Y"), step("c", "M NOTE", "Z"))
NESTED = (model("inner", steps=(step("a", "X", "Y"), step("b", "X", "Z"))), model("a"), model("b"))
OUTPUTS = (TensorSpec("Y", "FP32", (LARGE,)), TensorSpec("Z", "FP32", (1,)))


@pytest.mark.parametrize(
    ("ensemble", "others", "inputs", "has_places"),
    [
        (model(steps=(step("a", "X", "M"), step("b", "X M", "Y"))), [*map(model, "ab")], [numbers()], True),
        (model(steps=(step("a", "X", "Y"), step("b", "X", "Z"))), [*map(model, "ab")], [numbers()], False),
        (model(steps=FAN_OUT), [*map(model, "abc")], [numbers()], True),
        (model(steps=FAN_OUT), [*map(model, "abc")], [numbers(LARGE, "NOTE")], False),
        (model("m", *OUTPUTS, steps=FAN_OUT), [*map(model, "abc")], [], False),
        (model(steps=(step("inner", "X", "Y"),)), NESTED, [numbers()], False),
        (model(steps=(step("a", "X", "Y"),), decoupled=True), [model("a")], [numbers()], False),
        (model(steps=(step("a", "X", "Y"),)), [], [numbers()], False),
    ],
    ids=[
        "a chain",
        "parallel steps may still read the input",
        "parallel steps read intermediate tensors",
        "one of several parallel steps reads the input",
        "parallel steps may still write an output",
        "the steps of a nested ensemble",
        "a decoupled ensemble",
        "an unknown step",
    ],
)
def test_which_ensembles_use_shared_memory(
    ensemble: ModelConfig, others: Sequence[ModelConfig], inputs: list[Tensor], *, has_places: bool
) -> None:
    """An ensemble ends as soon as one step fails, while parallel steps continue."""
    assert (layout(ensemble, *others, inputs=tuple(inputs)) is not None) is has_places


def test_a_reloaded_model_changes_the_layout() -> None:
    layouts = Layouts(MAX_MESSAGE_BYTES)
    request = InferenceRequest("m", (numbers(),))
    for name in "ab":
        layouts.learn(model(name), "")
    layouts.learn(model(steps=(step("a", "X", "Y"), step("b", "X", "Z"))), "")
    assert layouts.layout_of(request) is None
    layouts.learn(model(), "")
    assert layouts.layout_of(request) is not None
