"""Properties of a configuration: completeness, and the order in which the steps of an ensemble can run."""

from typing import Any

import pytest

from app.core.model import ModelConfig, Step, takes_traceparent
from tests.toolkit.models import ensemble, model


def step(name: str, reads: str, writes: str) -> Step:
    """``reads`` and ``writes`` are names of the ensemble's tensors."""
    return Step(
        name, "", tuple((tensor, tensor) for tensor in reads.split()), tuple((each, each) for each in writes.split())
    )


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        ([step("a", "X", "t"), step("b", "t", "Y")], [0, 1]),
        ([step("b", "t", "Y"), step("a", "X", "t")], [1, 0]),
        ([step("a", "X", "t"), step("a", "X", "t")], [0, 1]),
        ([step("a", "never", "t"), step("b", "X", "Y")], [1]),
        ([step("a", "u", "t"), step("b", "t", "u")], []),
        ([step("a", "", "t")], [0]),
        ([], []),
    ],
)
def test_a_step_runs_after_the_steps_that_write_its_inputs(steps: list[Step], order: list[int]) -> None:
    assert model("X FP32 [1]", "Y FP32 [1]", steps=tuple(steps)).runnable_steps(["X"]) == order


@pytest.mark.parametrize(
    ("inputs", "outputs", "is_declared"),
    [
        ("X FP32 [1]", "Y FP32 [1]", True),
        ([], "Y FP32 [1]", False),
        ("X FP32 [1]", [], False),
        ("X INVALID [1]", "Y FP32 [1]", False),
        ("X FP32 [1]", "Y FP32 []", False),
    ],
)
def test_declared_tensors_need_a_datatype_and_a_shape(
    inputs: str | list[str], outputs: str | list[str], is_declared: bool
) -> None:
    assert model(inputs, outputs).declares_tensors is is_declared


def reader(name: str = "reader", **more: Any) -> ModelConfig:
    return model("X FP32 [1]", "Y FP32 [1]", name=name, parameters=(("reads_traceparent", "true"),), **more)


def test_a_trace_is_sent_if_a_model_below_reads_it() -> None:
    inner = ensemble("inner", reader())
    outer = ensemble("outer", inner)
    models = {each.name: each for each in (outer, inner, reader())}
    assert takes_traceparent(outer, models)
    script = model(name="script", parameters=(("bls_calls", "reader"),))
    assert takes_traceparent(script, models)
    assert not takes_traceparent(model(name="other"), models)


def test_a_trace_is_never_sent_to_the_vllm_backend() -> None:
    assert not takes_traceparent(reader(backend="vllm"), {})
    llm = model(name="llm", backend="vllm")
    script = model(name="script", parameters=(("bls_calls", "llm"), ("reads_traceparent", "true")))
    assert not takes_traceparent(script, {"llm": llm})
