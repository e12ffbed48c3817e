"""The schemas of requests, one for each model: each has the fields of its pipeline."""

from typing import Any

from app.api.openai.embeddings import MAX_INPUTS
from app.api.openai.members import NEUTRAL
from app.api.openapi.answers import Schema
from app.pipelines.example import example_of
from app.pipelines.openai.form import EmbeddingsForm, TextForm
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import request_schema

_TEXT: Schema = {"type": "string"}
_ONE_TEXT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 1}]}
_STOP_TEXT: Schema = {**_TEXT, "minLength": 1, "maxLength": 256}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "additionalProperties": False,
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
    },
}
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}


def completion_schema(pipeline: Pipeline, form: TextForm) -> Schema:
    return _schema(pipeline, form, {"prompt": _ONE_TEXT}, _text_fields(pipeline))


def chat_schema(pipeline: Pipeline, form: TextForm) -> Schema:
    return _schema(pipeline, form, {"messages": _MESSAGES}, _text_fields(pipeline))


def embeddings_schema(pipeline: Pipeline, form: EmbeddingsForm) -> Schema:
    texts = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}
    fields: Schema = {"encoding_format": {"enum": ["float", "base64"]}}
    return _schema(pipeline, form, {"input": {"anyOf": [_TEXT, texts]}}, fields)


def example_text_of(pipeline: Pipeline, field: str) -> Any:
    """The value of a field in the pipeline's example."""
    return example_of(pipeline).get(field, "text")


def _text_fields(pipeline: Pipeline) -> Schema:
    stop = {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "minItems": 1, "maxItems": 4}]}
    streams = {"stream": {"type": "boolean"}} if pipeline.spec.stream is not None else {"stream": {"const": False}}
    return {**streams, "stop": stop}


def _schema(pipeline: Pipeline, form: TextForm | EmbeddingsForm, needed: Schema, fields: Schema) -> Schema:
    """Required are ``model``, ``needed`` and what the pipeline requires beside the prompt."""
    known = request_schema(pipeline)
    own = {name: known["properties"][field] for name, field in form.field_by_parameter.items()}
    required = [name for name, field in form.field_by_parameter.items() if field in known.get("required", [])]
    neutral = {name: {"enum": list(values)} for name, values in NEUTRAL.items() if name not in own}
    return {
        "title": pipeline.name,
        "type": "object",
        "required": ["model", *needed, *required],
        "properties": {"model": {"const": pipeline.name}, **needed, **neutral, **fields, **own},
        "additionalProperties": False,
    }
