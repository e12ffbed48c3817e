"""Properties of a configuration: completeness, the order of an ensemble's steps, and the accepted sequence ids."""

from typing import Any

import pytest

from app.core.errors import InvalidInput
from app.core.model import ModelConfig, SequenceBatching, SequenceIds, Step, sequence_ids_of, takes_traceparent
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


def of(datatype: str, name: str = "m", **more: Any) -> ModelConfig:
    return model("X FP32 [1]", "Y FP32 [1]", name=name, sequence=SequenceBatching(datatype, **more))


def ids(*configs: ModelConfig) -> SequenceIds:
    return sequence_ids_of(configs[0], {each.name: each for each in configs})


def accepts(rules: SequenceIds, sequence_id: Any) -> bool:
    try:
        rules.check(sequence_id)
    except InvalidInput:
        return False
    return True


LARGEST = {"UINT64": 2**64 - 1, "INT64": 2**63 - 1, "UINT32": 2**32 - 1, "INT32": 2**31 - 1}
STEP = of("INT32", "step")
INNER = ensemble("inner", STEP)
SCRIPT = model(name="script", parameters=(("bls_calls", "child"),))
STATEFUL_SCRIPT = model(name="script", parameters=(("bls_calls", "text,number"),), sequence=SequenceBatching())


@pytest.mark.parametrize(
    ("rules", "right", "wrong"),
    [
        *(
            (ids(of(datatype)), [1, largest], [0, -1, largest + 1, "1", "", "x" * 128, True, 1.0])
            for datatype, largest in LARGEST.items()
        ),
        (
            ids(of("BYTES")),
            [*("x" * size for size in (1, 124, 128)), "\u00fc" * 64],
            ["", "\u00fc" * 65, "x" * 129, *("x" * size for size in (125, 126, 127)), 0, 1, 2**40],
        ),
        # without a control, numbers and texts are allowed
        (ids(of("")), [1, 2**64 - 1, "x", "x" * 126], [2**64, "x" * 129, 0]),
        (ids(model()), [1, 2**64 - 1, "x", "x" * 126, 0], [2**64, "x" * 129]),
        (ids(of("UINT64", is_iterative=True)), [0, ""], [1, "x"]),
        # an ensemble accepts what all its steps accept; a script needs no id for the models that it calls
        (ids(ensemble("outer", INNER), INNER, STEP), [2**31 - 1], [2**31, "x", 0]),
        (ids(SCRIPT, of("UINT32", "child")), [0, 2**32 - 1], [2**32, "x"]),
        (ids(STATEFUL_SCRIPT, of("BYTES", "text"), of("UINT64", "number")), [], [1, "x", 0]),
    ],
    ids=[*LARGEST, "text", "no control", "no sequence", "iterative", "ensemble", "script", "no common form"],
)  # fmt: skip
def test_an_id_fits_all_controls(rules: SequenceIds, right: list[Any], wrong: list[Any]) -> None:
    assert [each for each in right if not accepts(rules, each)] == []
    assert [each for each in wrong if accepts(rules, each)] == []


def test_the_rules_name_the_model_that_needs_an_id() -> None:
    assert ids(ensemble("outer", INNER), INNER, STEP).needed_by == "step"
    assert ids(SCRIPT, of("UINT32", "child")).needed_by == ids(of("UINT64", is_iterative=True)).needed_by == ""
    assert "no id fits" in ids(STATEFUL_SCRIPT, of("BYTES", "text"), of("UINT64", "number")).form
