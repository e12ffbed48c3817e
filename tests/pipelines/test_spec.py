"""The rules and the defaults of ``gateway.yaml``."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.pipelines.spec import (
    ContractSpec,
    EarlyExitRule,
    ErrorMatch,
    InputSpec,
    OutputSpec,
    ParameterSpec,
    PipelineSpec,
    StreamSpec,
)


def refused(section: Any, /, **words: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(**words)
    return str(caught.value)


def test_the_defaults() -> None:
    spec = PipelineSpec(model="m")
    assert (spec.stream, spec.batch, spec.idempotent, spec.warmup) == (None, False, False, True)
    assert (spec.early_exit, spec.readiness) == ([], "required")


@pytest.mark.parametrize("value", [True, None, {}])
def test_stream_without_words_means_the_defaults(value: Any) -> None:
    stream = PipelineSpec.model_validate({"model": "m", "stream": value}).stream
    assert stream == StreamSpec()
    assert stream is not None
    assert (stream.progress_s, stream.timeout_s, stream.commit_s) == (30, 600, 5)


def test_stream_may_be_switched_off_in_words() -> None:
    assert PipelineSpec.model_validate({"model": "m", "stream": False}).stream is None


@pytest.mark.parametrize(
    "words",
    [
        {"kind": "text", "minimum": 1},
        {"kind": "image", "maximum": 1},
        {"kind": "number", "minimum": 2, "maximum": 1},
        {"kind": "number", "minimum": float("nan")},
        {"kind": "number", "maximum": float("inf")},
        {"kind": "number", "minimum": True},
        {"kind": "number", "enum": []},
        {"kind": "number", "enum": ["one"]},
        {"kind": "number", "enum": [True]},
        {"kind": "text", "enum": [1]},
        {"kind": "json", "enum": ["a"]},
        {"kind": "image", "enum": ["a"]},
    ],
)
def test_constraints_that_cannot_hold_of_an_input(words: dict[str, Any]) -> None:
    refused(InputSpec, tensor="X", **words)


@pytest.mark.parametrize(
    "words",
    [
        {"type": "string", "minimum": 1},
        {"type": "boolean", "enum": [1]},
        {"type": "string", "enum": [1]},
        {"type": "integer", "enum": ["a"]},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "float"},
    ],
)
def test_constraints_that_cannot_hold_of_a_parameter(words: dict[str, Any]) -> None:
    refused(ParameterSpec, **words)


def test_bounds_keep_every_digit() -> None:
    assert InputSpec(tensor="X", maximum=2**53 + 1).maximum == 2**53 + 1


@pytest.mark.parametrize("kind", ["number", "json", "image", "binary"])
def test_only_text_is_concatenated(kind: str) -> None:
    assert "concatenate" in refused(OutputSpec, tensor="Y", kind=kind, join="concatenate")


@pytest.mark.parametrize(
    "words",
    [{}, {"message": "a", "signed": True}, {"message": "a", "message_pattern": "a"}, {"message_pattern": "("}],
)
def test_an_error_is_matched_in_one_way_that_works(words: dict[str, Any]) -> None:
    refused(ErrorMatch, code="any", **words)


def test_an_error_needs_a_code_that_grpc_has() -> None:
    refused(ErrorMatch, message="x")
    refused(ErrorMatch, message="x", code="OK")


@pytest.mark.parametrize(
    "words", [{}, {"missing": ["Y"], "empty": ["Y"]}, {"missing": []}, {"empty": []}, {"error": {}}]
)
def test_a_rule_has_exactly_one_condition(words: dict[str, Any]) -> None:
    refused(EarlyExitRule, reason="x", **words)


@pytest.mark.parametrize("reason", ["", "No", "a b", "1a", "a" * 65, "a\n"])
def test_a_reason_is_a_word(reason: str) -> None:
    refused(EarlyExitRule, reason=reason, missing=["Y"])


@pytest.mark.parametrize("name", ["", "a b", ".a", "a\n", "ä", "a" * 129, "a/b"])
def test_a_name_is_a_word(name: str) -> None:
    refused(PipelineSpec, model="m", inputs={name: {"tensor": "X"}})


@pytest.mark.parametrize(
    "name", ["triton_x", "sequence_id", "priority", "timeout", "headers", "binary_data_output", "shared_memory_region"]
)
def test_reserved_parameters_are_refused_unless_they_are_tensors(name: str) -> None:
    refused(PipelineSpec, model="m", parameters={name: {"type": "integer"}})
    PipelineSpec.model_validate({"model": "m", "parameters": {name: {"type": "integer", "tensor": "X"}}})


def test_a_contract_counts_from_nothing() -> None:
    assert ContractSpec(max_items=0).max_items == 0
    refused(ContractSpec, max_items=-1)


@pytest.mark.parametrize("bound", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_bound_is_a_finite_number(bound: float) -> None:
    refused(InputSpec, tensor="X", minimum=bound)
    refused(ParameterSpec, type="number", maximum=bound)


@pytest.mark.parametrize("value", [float("inf"), 2**64, b"x", {1: 2}, [float("nan")]])
def test_a_default_has_a_json_form(value: Any) -> None:
    assert "is not valid in JSON: " in refused(InputSpec, tensor="X", default=value)
    assert "is not valid in JSON: " in refused(ParameterSpec, type="string", default=value)
    assert "is not valid in JSON: " in refused(PipelineSpec, model="m", sample={"x": value})
