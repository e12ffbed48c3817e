"""The sequence ids that models accept."""

from typing import Any

import pytest

from app.core.errors import InvalidInput
from app.core.model import ModelConfig, SequenceBatching
from app.core.sequence import SequenceIds, sequence_ids_of
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


@pytest.mark.parametrize(
    ("datatype", "largest"), [("UINT64", 2**64 - 1), ("INT64", 2**63 - 1), ("UINT32", 2**32 - 1), ("INT32", 2**31 - 1)]
)
def test_a_number_fits_the_control(datatype: str, largest: int) -> None:
    rules = ids(of(datatype))
    assert accepts(rules, 1)
    assert accepts(rules, largest)
    for wrong in (0, -1, largest + 1, "1", "", "x" * 128, True, 1.0):
        assert not accepts(rules, wrong)


def test_a_text_fits_the_control() -> None:
    rules = ids(of("BYTES"))
    for size in (1, 124, 128):
        assert accepts(rules, "x" * size)
    assert accepts(rules, "\u00fc" * 64)
    for wrong in ("", "\u00fc" * 65, "x" * 129, *("x" * size for size in (125, 126, 127)), 0, 1, 2**40):
        assert not accepts(rules, wrong)


@pytest.mark.parametrize("config", [of(""), model()])
def test_without_a_control_numbers_and_texts_are_allowed(config: ModelConfig) -> None:
    rules = ids(config)
    for right in (1, 2**64 - 1, "x", "x" * 126):
        assert accepts(rules, right)
    for wrong in (2**64, "x" * 129):
        assert not accepts(rules, wrong)
    assert accepts(rules, 0) is (config.sequence is None)


def test_an_id_of_an_iterative_sequence_is_refused() -> None:
    rules = ids(of("UINT64", is_iterative=True))
    assert (rules.needed_by, accepts(rules, 0), accepts(rules, "")) == ("", True, True)
    assert not accepts(rules, 1)
    assert not accepts(rules, "x")


def test_an_ensemble_accepts_what_all_its_steps_accept() -> None:
    step = of("INT32", "step")
    outer = ensemble("outer", ensemble("inner", step))
    rules = ids(outer, ensemble("inner", step), step)
    assert rules.needed_by == "step"
    assert accepts(rules, 2**31 - 1)
    assert not accepts(rules, 2**31)
    assert not accepts(rules, "x")


def test_a_script_needs_no_id_for_the_models_that_it_calls() -> None:
    script = model(name="script", parameters=(("bls_calls", "child"),))
    rules = ids(script, of("UINT32", "child"))
    assert (rules.needed_by, rules.max_number, rules.takes_text) == ("", 2**32 - 1, False)


def test_steps_of_different_types_accept_no_id() -> None:
    script = model(name="script", parameters=(("bls_calls", "text,number"),), sequence=SequenceBatching())
    rules = ids(script, of("BYTES", "text"), of("UINT64", "number"))
    assert not any(accepts(rules, each) for each in (1, "x", 0))
    assert "no id fits" in rules.form
