"""The sequence ids that models accept."""

from typing import Any

import pytest

from app.core.errors import InvalidInput
from app.core.model import ModelConfig, SequenceBatching, SequenceIds, sequence_ids_of
from tests.toolkit.models import ensemble, model


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
