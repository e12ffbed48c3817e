"""The operations of the catalog: the list of the pipelines, and the description of each pipeline."""

from collections.abc import Sequence

from app.api.openapi.answers import Schema, json_answer, operation, problems
from app.api.openapi.health import STATE
from app.domain import errors
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
            "additionalProperties": {"enum": ["not_ready", "other_signature"]},
            "description": "Of several Tritons, the addresses that are not called for the pipeline",
        },
    },
}
_PARTS = {"inputs": "array", "parameters": "array", "outputs": "array", "graph": "object", "early_exit": "array"}
_PARTS |= {"limits": "object", "schemas": "object", "sample": "object", "samples": "object"}
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
        **{name: {"type": type_} for name, type_ in _PARTS.items()},
        "examples": {"type": "array", "items": _EXAMPLE},
    },
}


def _listed() -> Schema:
    pipelines = {"type": "array", "items": _SUMMARY}
    may_explain = {"type": "boolean", "description": "Whether this caller may send `X-Explain: 1`"}
    properties = {"pipelines": pipelines, "may_explain": may_explain}
    schema = {"type": "object", "required": list(properties), "properties": properties}
    return {"200": json_answer("The pipelines", schema), **problems()}


def describe_operation(pipeline: Pipeline) -> Schema:
    """Each pipeline has its own path, where POST runs it."""
    answers = {"200": json_answer("The pipeline", _DESCRIPTION), **problems(errors.UnknownPipeline)}
    summary = "Fields, types, limits, graph and samples"
    return operation(f"describe_{pipeline.name}", pipeline.name, summary, answers)


def example_operation(pipeline: Pipeline, names: Sequence[str], request: Schema) -> Schema:
    """``names``: the pipeline's examples; ``request``: the schema of its request."""
    name = {"name": "example", "in": "path", "required": True, "schema": {"enum": list(names)}}
    possible = (errors.UnknownPipeline, errors.UnknownExample, errors.ModelNotReady, errors.TooManyRequests)
    answers = {"200": json_answer("A valid request, with its files", request), **problems(*possible)}
    return operation(f"example_{pipeline.name}", pipeline.name, "An example of a request", answers, name)


CATALOG_PATHS: Schema = {"/v1/pipelines": {"get": operation("list_pipelines", "catalog", "The pipelines", _listed())}}
