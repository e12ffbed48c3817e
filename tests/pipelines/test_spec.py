"""Validation and defaults of ``gateway.yaml``."""

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


def error_of(section: Any, /, **keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(**keys)
    return str(caught.value)


def test_the_defaults() -> None:
    spec = PipelineSpec(model="m")
    assert (spec.stream, spec.batch, spec.idempotent, spec.warmup) == (None, None, False, True)
    assert (spec.early_exit, spec.readiness) == ([], "required")


@pytest.mark.parametrize("value", [True, None, {}])
def test_stream_without_keys_has_the_defaults(value: Any) -> None:
    stream = PipelineSpec.model_validate({"model": "m", "stream": value}).stream
    assert stream == StreamSpec()
    assert stream is not None
    assert (stream.progress_s, stream.timeout_s, stream.commit_s) == (30, 600, 5)


def test_the_longest_time_until_the_first_output_is_progress_s_by_default() -> None:
    assert StreamSpec(progress_s=7).longest_first_s == 7
    assert StreamSpec(progress_s=7, first_output_s=300).longest_first_s == 300


def test_stream_false_turns_streams_off() -> None:
    assert PipelineSpec.model_validate({"model": "m", "stream": False}).stream is None


@pytest.mark.parametrize(
    "keys",
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
def test_invalid_constraints_of_an_input_are_rejected(keys: dict[str, Any]) -> None:
    error_of(InputSpec, tensor="X", **keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"type": "string", "minimum": 1},
        {"type": "boolean", "enum": [1]},
        {"type": "string", "enum": [1]},
        {"type": "integer", "enum": ["a"]},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "float"},
    ],
)
def test_invalid_constraints_of_a_parameter_are_rejected(keys: dict[str, Any]) -> None:
    error_of(ParameterSpec, **keys)


def test_bounds_keep_every_digit() -> None:
    assert InputSpec(tensor="X", maximum=2**53 + 1).maximum == 2**53 + 1


@pytest.mark.parametrize("kind", ["number", "image", "binary"])
def test_only_text_and_json_can_be_concatenated(kind: str) -> None:
    assert "concatenate" in error_of(OutputSpec, tensor="Y", kind=kind, join="concatenate")


@pytest.mark.parametrize(
    "keys",
    [{}, {"message": "a", "signed": True}, {"message": "a", "message_pattern": "a"}, {"message_pattern": "("}],
)
def test_an_error_rule_has_exactly_one_valid_match(keys: dict[str, Any]) -> None:
    error_of(ErrorMatch, code="any", **keys)


def test_an_error_rule_needs_a_grpc_error_code() -> None:
    error_of(ErrorMatch, message="x")
    error_of(ErrorMatch, message="x", code="OK")


@pytest.mark.parametrize(
    "keys", [{}, {"missing": ["Y"], "empty": ["Y"]}, {"missing": []}, {"empty": []}, {"error": {}}]
)
def test_a_rule_has_exactly_one_condition(keys: dict[str, Any]) -> None:
    error_of(EarlyExitRule, reason="x", **keys)


@pytest.mark.parametrize("reason", ["", "No", "a b", "1a", "a" * 65, "a\n"])
def test_invalid_reasons_are_rejected(reason: str) -> None:
    error_of(EarlyExitRule, reason=reason, missing=["Y"])


@pytest.mark.parametrize("name", ["", "a b", ".a", "a\n", "ä", "a" * 129, "a/b"])
def test_invalid_field_names_are_rejected(name: str) -> None:
    error_of(PipelineSpec, model="m", inputs={name: {"tensor": "X"}})


@pytest.mark.parametrize(
    "name", ["triton_x", "sequence_id", "priority", "timeout", "headers", "binary_data_output", "shared_memory_region"]
)
def test_reserved_names_are_allowed_for_tensors_only(name: str) -> None:
    error_of(PipelineSpec, model="m", parameters={name: {"type": "integer"}})
    PipelineSpec.model_validate({"model": "m", "parameters": {name: {"type": "integer", "tensor": "X"}}})


def test_max_items_may_be_zero() -> None:
    assert ContractSpec(max_items=0).max_items == 0
    error_of(ContractSpec, max_items=-1)


@pytest.mark.parametrize("bound", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_bound_must_be_a_finite_number(bound: float) -> None:
    error_of(InputSpec, tensor="X", minimum=bound)
    error_of(ParameterSpec, type="number", maximum=bound)


@pytest.mark.parametrize("value", [float("inf"), 2**64, b"x", {1: 2}, [float("nan")]])
def test_a_default_must_have_a_json_form(value: Any) -> None:
    assert "is not valid in JSON: " in error_of(InputSpec, tensor="X", default=value)
    assert "is not valid in JSON: " in error_of(ParameterSpec, type="string", default=value)
    assert "is not valid in JSON: " in error_of(PipelineSpec, model="m", sample={"x": value})
    assert "is not valid in JSON: " in error_of(PipelineSpec, model="m", examples={"a": {"x": value}})


def test_examples_have_the_form_of_the_sample() -> None:
    spec = PipelineSpec.model_validate({"model": "m", "examples": {"dark-1": {"x": [1, None]}, "a" * 64: {}}})
    assert spec.examples == {"dark-1": {"x": [1, None]}, "a" * 64: {}}
    assert PipelineSpec(model="m").examples == {}


@pytest.mark.parametrize("pattern", ["(", "", "x" * 1025])
def test_an_engine_error_is_a_regular_expression(pattern: str) -> None:
    assert PipelineSpec(model="m", engine_errors=["EngineDeadError"]).engine_errors == ["EngineDeadError"]
    with pytest.raises(ValidationError, match="engine_errors"):
        PipelineSpec(model="m", engine_errors=[pattern])
