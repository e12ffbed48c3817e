"""Validation and defaults of ``gateway.yaml``."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.config.document import Section
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


def test_the_defaults() -> None:
    spec = PipelineSpec(model="m")
    assert (spec.stream, spec.batch, spec.idempotent, spec.warmup) == (None, None, False, True)
    assert (spec.early_exit, spec.readiness, spec.examples) == ([], "required", {})


@pytest.mark.parametrize("value", [True, None, {}])
def test_stream_without_keys_has_the_defaults(value: Any) -> None:
    stream = PipelineSpec.model_validate({"model": "m", "stream": value}).stream
    assert stream == StreamSpec()
    assert stream is not None
    assert (stream.progress_s, stream.timeout_s, stream.commit_s) == (30, 600, 5)
    assert PipelineSpec.model_validate({"model": "m", "stream": False}).stream is None


def test_the_longest_time_until_the_first_output_is_progress_s_by_default() -> None:
    assert StreamSpec(progress_s=7).longest_first_s == 7
    assert StreamSpec(progress_s=7, first_output_s=300).longest_first_s == 300


def test_values_are_kept_as_written() -> None:
    assert InputSpec(tensor="X", maximum=2**53 + 1).maximum == 2**53 + 1
    assert ContractSpec(max_items=0).max_items == 0
    examples: dict[str, Any] = {"dark-1": {"x": [1, None]}, "a" * 64: {}}
    assert PipelineSpec(model="m", examples=examples).examples == examples
    assert PipelineSpec(model="m", engine_errors=["EngineDeadError"]).engine_errors == ["EngineDeadError"]


INFINITE = [10**400, -(10**400), float("inf"), float("nan")]
NO_JSON = [float("inf"), 2**64, b"x", {1: 2}, [float("nan")]]
X: dict[str, Any] = {"tensor": "X"}
M: dict[str, Any] = {"model": "m"}
EXIT: dict[str, Any] = {"missing": ["Y"]}


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (InputSpec, {**X, "kind": "text", "minimum": 1}),
        (InputSpec, {**X, "kind": "image", "maximum": 1}),
        (InputSpec, {**X, "minimum": 2, "maximum": 1}),
        (InputSpec, {**X, "minimum": True}),
        (InputSpec, {**X, "enum": []}),
        (InputSpec, {**X, "enum": ["one"]}),
        (InputSpec, {**X, "enum": [True]}),
        (InputSpec, {**X, "kind": "text", "enum": [1]}),
        (InputSpec, {**X, "kind": "json", "enum": ["a"]}),
        (InputSpec, {**X, "kind": "image", "enum": ["a"]}),
        *((InputSpec, {**X, "minimum": bound}) for bound in INFINITE),
        (ParameterSpec, {"type": "string", "minimum": 1}),
        (ParameterSpec, {"type": "boolean", "enum": [1]}),
        (ParameterSpec, {"type": "string", "enum": [1]}),
        (ParameterSpec, {"type": "integer", "enum": ["a"]}),
        (ParameterSpec, {"type": "integer", "minimum": 2, "maximum": 1}),
        (ParameterSpec, {"type": "float"}),
        *((ParameterSpec, {"type": "number", "maximum": bound}) for bound in INFINITE),
        *((OutputSpec, {**X, "kind": kind, "join": "concatenate"}) for kind in ("number", "image", "binary")),
        *((ErrorMatch, {"code": "any", **keys}) for keys in ({}, {"message": "a", "signed": True})),
        (ErrorMatch, {"code": "any", "message": "a", "message_pattern": "a"}),
        (ErrorMatch, {"code": "any", "message_pattern": "("}),
        (ErrorMatch, {"message": "x"}),
        (ErrorMatch, {"message": "x", "code": "OK"}),
        *((EarlyExitRule, {"reason": "x", **keys}) for keys in ({}, {**EXIT, "empty": ["Y"]}, {"missing": []})),
        (EarlyExitRule, {"reason": "x", "empty": []}),
        (EarlyExitRule, {"reason": "x", "error": {}}),
        *((EarlyExitRule, {"reason": each, **EXIT}) for each in ("", "No", "a b", "1a", "a" * 65, "a\n")),
        (ContractSpec, {"max_items": -1}),
        *((PipelineSpec, {**M, "inputs": {each: X}}) for each in ("", "a b", ".a", "a\n", "\u00e4", "a" * 129, "a/b")),
        *((PipelineSpec, {**M, "engine_errors": [each]}) for each in ("(", "", "x" * 1025)),
    ],
    ids=str,
)
def test_an_invalid_section_is_rejected(section: type[Section], keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        section(**keys)


@pytest.mark.parametrize(
    "name", ["triton_x", "sequence_id", "priority", "timeout", "headers", "binary_data_output", "shared_memory_region"]
)
def test_reserved_names_are_allowed_for_tensors_only(name: str) -> None:
    with pytest.raises(ValidationError, match="is reserved by Triton"):
        PipelineSpec.model_validate({"model": "m", "parameters": {name: {"type": "integer"}}})
    PipelineSpec.model_validate({"model": "m", "parameters": {name: {"type": "integer", "tensor": "X"}}})


@pytest.mark.parametrize("value", NO_JSON, ids=str)
@pytest.mark.parametrize(
    ("section", "keys", "key"),
    [(InputSpec, X, "default"), (ParameterSpec, {"type": "string"}, "default"), (PipelineSpec, M, "sample")],
)
def test_a_value_must_have_a_json_form(section: type[Section], keys: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match="is not valid in JSON: "):
        section(**keys, **{key: value if key == "default" else {"x": value}})
