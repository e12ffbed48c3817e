"""The schemas of requests, one for each model: each has the fields of its pipeline."""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.api.openai.embeddings import MAX_INPUTS
from app.api.openai.neutral import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS, Labels, Neutral
from app.domain.json_schema import Schema, const_of, enum_of
from app.pipelines.example import example_of
from app.pipelines.openai.form import EmbeddingsForm, TextForm
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import request_schema

_TEXT: Schema = {"type": "string"}
_ONE_TEXT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 1}]}
_STOP_TEXT: Schema = {**_TEXT, "minLength": 1, "maxLength": 256}
_LABELS: Schema = {"anyOf": [msgspec.json.schema(Labels), {"type": "null"}]}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": const_of("text"), "text": _TEXT, "prompt_cache_breakpoint": _LABELS},
    "additionalProperties": False,
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": enum_of(["system", "developer", "user", "assistant"]),
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
        **{name: {"type": "null"} for name in ("refusal", "audio", "function_call", "tool_calls", "annotations")},
    },
    "additionalProperties": False,
}
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}


def completion_schema(pipeline: Pipeline, form: TextForm) -> Schema:
    schema = _schema(pipeline, form, {"prompt": _ONE_TEXT}, _text_fields(pipeline, form))
    return schema | {"dependentSchemas": _OPTIONS_OF_STREAMS}


def chat_schema(pipeline: Pipeline, form: TextForm) -> Schema:
    schema = _schema(pipeline, form, {"messages": _MESSAGES}, _text_fields(pipeline, form))
    return schema | {"dependentSchemas": _ONE_LIMIT | _OPTIONS_OF_STREAMS}


def embeddings_schema(pipeline: Pipeline, form: EmbeddingsForm) -> Schema:
    texts = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}
    fields = _schemas_of(NEUTRAL_OF_EMBEDDINGS)
    fields["encoding_format"] = enum_of(["float", "base64", None])
    if form.length > 0:
        fields["dimensions"] = enum_of([form.length, None])
    return _schema(pipeline, form, {"input": {"anyOf": [_TEXT, texts]}}, fields)


def _schemas_of(neutral: Mapping[str, Neutral]) -> Schema:
    return {name: each.schema for name, each in neutral.items()}


def example_text_of(pipeline: Pipeline, field: str) -> Any:
    """The value of a field in the pipeline's example."""
    return example_of(pipeline).get(field, "text")


def _text_fields(pipeline: Pipeline, form: TextForm) -> Schema:
    """The fields that the gateway supports, and the values of other fields that have no effect."""
    stops: Schema = {"type": "array", "items": _STOP_TEXT, "minItems": 1, "maxItems": 4}
    fields = _schemas_of(NEUTRAL_OF_TEXTS)
    fields |= {"stop": {"anyOf": [_STOP_TEXT, stops, {"type": "null"}]}, "stream": enum_of([False, None])}
    if pipeline.spec.stream is not None:
        usage = enum_of([False, True, None] if form.usage is not None else [False, None])
        options = {"type": ["object", "null"], "properties": {"include_usage": usage}, "additionalProperties": False}
        fields |= {"stream": {"type": ["boolean", "null"]}, "stream_options": options}
    return fields


_OPTIONS_OF_STREAMS: Schema = {
    "stream_options": {
        "anyOf": [
            {"required": ["stream"], "properties": {"stream": const_of(True)}},
            {"properties": {"stream_options": {"type": "null"}}},
        ]
    }
}
_ONE_LIMIT: Schema = {
    "max_completion_tokens": {
        "anyOf": [
            {"properties": {"max_completion_tokens": {"type": "null"}}},
            {"properties": {"max_tokens": {"type": "null"}}},
        ]
    }
}
"""Only one of ``max_tokens`` and ``max_completion_tokens`` may be given."""


def _schema(pipeline: Pipeline, form: TextForm | EmbeddingsForm, needed: Schema, fields: Schema) -> Schema:
    """Requires ``model``, ``needed`` and the pipeline's required fields other than the prompt."""
    known = request_schema(pipeline)
    own = {name: known["properties"][field] for name, field in form.field_by_parameter.items()}
    required = [name for name, field in form.field_by_parameter.items() if field in known.get("required", [])]
    return {
        "title": pipeline.name,
        "type": "object",
        "required": ["model", *needed, *required],
        "properties": {"model": const_of(pipeline.name), **needed, **fields, **own},
        "additionalProperties": False,
    }
