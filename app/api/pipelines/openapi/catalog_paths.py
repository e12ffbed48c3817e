"""The operations of the catalog: the list of the pipelines, and the description of each pipeline."""

from collections.abc import Sequence

from app.api.openapi.answers import json_answer, operation, problems
from app.api.openapi.health import STATE
from app.domain import errors
from app.domain.json_schema import Schema, enum_of
from app.pipelines.pipeline import Pipeline

_TEXT: Schema = {"type": "string"}
_SUMMARY: Schema = {
    "type": "object",
    "required": ["name", "description", "model", "state", "state_detail", "streams", "url"],
    "properties": {
        "name": _TEXT,
        "description": _TEXT,
        "model": _TEXT,
        "state": STATE,
        "state_detail": {"type": ["string", "null"], "description": "Why the pipeline is not ready"},
        "streams": {"type": "boolean"},
        "url": _TEXT,
        "missing_at": {
            "type": "object",
            "additionalProperties": enum_of(["not_ready", "other_signature"]),
            "description": "Of several Tritons, the addresses that are not called for the pipeline",
        },
    },
}
_ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}


def _field(**more: Schema) -> Schema:
    """Describes an input or an output."""
    tensor: Schema = {"name": _TEXT, "kind": _TEXT, "tensor": _TEXT, "datatype": _TEXT}
    tensor["shape"] = {"type": "array", "items": {"type": "integer"}, "description": "-1: any size"}
    return {"type": "object", "required": [*tensor, *more], "properties": {**tensor, **more}}


_PARAMETER: Schema = {
    "type": "object",
    "required": ["name", "required", "type"],
    "properties": {"name": _TEXT, "required": {"type": "boolean"}, "type": _TEXT},
    "additionalProperties": True,
    "description": "With the keys of gateway.yaml, such as `minimum` and `default`",
}
_PARTS: Schema = {
    "version": {"type": ["string", "null"], "description": "null: Triton chooses the version"},
    "decoupled": {"type": "boolean"},
    "inputs": {"type": "array", "items": _field(required={"type": "boolean"}, default={})},
    "parameters": {"type": "array", "items": _PARAMETER},
    "outputs": {"type": "array", "items": _field(join={"type": ["string", "null"]})},
    "graph": _ANY_OBJECT,
    "early_exit": {"type": "array", "items": _TEXT, "description": "The possible reasons"},
    "limits": _ANY_OBJECT,
    "schemas": {**_ANY_OBJECT, "description": "JSON Schemas: `request`, `result`, `output_event`"},
    "sample": {**_ANY_OBJECT, "description": "The values of a valid request, without its files"},
    "samples": {"type": "object", "additionalProperties": _TEXT, "description": "Calls that work as pasted"},
}
_EXAMPLE: Schema = {
    "type": "object",
    "required": ["name", "files"],
    "properties": {
        "name": {**_TEXT, "description": "`sample` is the pipeline's sample"},
        "files": {"type": "object", "additionalProperties": _TEXT, "description": "The paths of its files by field"},
    },
}
_DESCRIPTION: Schema = {
    "type": "object",
    "description": "Until the pipeline's model is known, only the required properties are present",
    "required": _SUMMARY["required"],
    "properties": {
        **_SUMMARY["properties"],
        **_PARTS,
        "examples": {"type": "array", "items": _EXAMPLE},
    },
}
CATALOG_SCHEMAS: Schema = {"PipelineSummary": _SUMMARY, "PipelineDescription": _DESCRIPTION}


def _listed() -> Schema:
    pipelines = {"type": "array", "items": {"$ref": "#/components/schemas/PipelineSummary"}}
    may_explain = {"type": "boolean", "description": "Whether this caller may send `X-Explain: 1`"}
    properties = {"pipelines": pipelines, "may_explain": may_explain}
    schema = {"type": "object", "required": list(properties), "properties": properties}
    return {"200": json_answer("The pipelines", schema), **problems()}


def describe_operation(pipeline: Pipeline) -> Schema:
    """Each pipeline has its own path, where POST runs it."""
    answers = {
        "200": json_answer("The pipeline", {"$ref": "#/components/schemas/PipelineDescription"}),
        **problems(errors.UnknownPipeline),
    }
    summary = "Fields, types, limits, graph and samples"
    description = "What a form or a program needs to call the pipeline, with samples that work as pasted."
    return operation(f"describe_{pipeline.name}", pipeline.name, summary, description, answers)


def example_operation(pipeline: Pipeline, names: Sequence[str], request: Schema) -> Schema:
    """``names``: the pipeline's examples; ``request``: the schema of its request."""
    name = {"name": "example", "in": "path", "required": True, "schema": enum_of(names)}
    possible = (errors.UnknownPipeline, errors.UnknownExample, errors.ModelNotReady, errors.TooManyRequests)
    answers = {"200": json_answer("A valid request, with its files", request), **problems(*possible)}
    description = "The answer is the body of a valid request, with the content of its files in base64."
    summary = "An example of a request"
    return operation(f"example_{pipeline.name}", pipeline.name, summary, description, answers, name)


CATALOG_PATHS: Schema = {
    "/v1/pipelines": {
        "get": operation(
            "list_pipelines",
            "catalog",
            "The pipelines",
            "The pipelines that the caller may use, with their states, ready or not.",
            _listed(),
        )
    }
}
