"""OpenAPI 3.1 of what is served now, typed for each pipeline from its model's live configuration."""

from typing import Any

from app import __version__
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import event_schema, form_schema, request_schema, result_schema

Schema = dict[str, Any]

_PROBLEM: Schema = {
    "type": "object",
    "description": "RFC 9457",
    "required": ["type", "title", "status", "detail", "code", "request_id", "retryable"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "request_id": {"type": "string"},
        "retryable": {"type": "boolean"},
        "hint": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "problem": {"type": "string"}},
            },
        },
    },
}
_PROBLEM_RESPONSE: Schema = {"$ref": "#/components/responses/Problem"}


def openapi_of(catalog: Catalog) -> Schema:
    pipelines = [entry.pipeline for entry in catalog.entries.values() if entry.pipeline is not None]
    paths: Schema = dict(_FIXED_PATHS)
    for pipeline in pipelines:
        paths[f"/v1/pipelines/{pipeline.name}"] = {"post": _unary(pipeline)}
        if pipeline.spec.stream is not None:
            paths[f"/v1/pipelines/{pipeline.name}/stream"] = {"post": _stream(pipeline)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "triton-gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Problem": _PROBLEM},
            "responses": {
                "Problem": {
                    "description": "What went wrong",
                    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
                }
            },
        },
    }


def _unary(pipeline: Pipeline) -> Schema:
    headers: Schema = {"X-Request-ID": {"schema": {"type": "string"}}, "Server-Timing": {"schema": {"type": "string"}}}
    if pipeline.rules:
        headers["X-Early-Exit"] = {"schema": {"type": "string"}}
    ok = {
        "description": "The outputs; the same keys, empty, for an early exit",
        "headers": headers,
        "content": {"application/json": {"schema": result_schema(pipeline)}},
    }
    return _operation(pipeline, "run", ok)


def _stream(pipeline: Pipeline) -> Schema:
    ok = {
        "description": "`output` events, then exactly one `done` or `error`; the schema is that of an output's data",
        "content": {"text/event-stream": {"schema": event_schema(pipeline)}},
    }
    return _operation(pipeline, "stream", ok)


def _operation(pipeline: Pipeline, verb: str, ok: Schema) -> Schema:
    return {
        "operationId": f"{verb}_{pipeline.name}",
        "summary": pipeline.spec.description or f"Run {pipeline.spec.model}",
        "tags": [pipeline.name],
        "parameters": [
            {
                "name": "X-Request-Timeout",
                "in": "header",
                "schema": {"type": "number", "exclusiveMinimum": 0},
                "description": "Seconds, capped by the pipeline's own",
            }
        ],
        "requestBody": {"required": True, "content": _request_content(pipeline)},
        "responses": {"200": ok, "default": _PROBLEM_RESPONSE},
    }


def _request_content(pipeline: Pipeline) -> Schema:
    content: Schema = {"application/json": {"schema": request_schema(pipeline)}}
    if any(field.is_file for field in pipeline.inputs):
        content["multipart/form-data"] = {"schema": form_schema(pipeline)}
    return content


def _operation_of(summary: str, tag: str, status: str, description: str, *, path_parameter: str = "") -> Schema:
    parameter = {"name": path_parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": summary,
        "tags": [tag],
        **({"parameters": [parameter]} if path_parameter else {}),
        "responses": {status: {"description": description}, "default": _PROBLEM_RESPONSE},
    }


def _get(summary: str, tag: str, *, path_parameter: str = "") -> Schema:
    return {"get": _operation_of(summary, tag, "200", "OK", path_parameter=path_parameter)}


def _start_stream() -> Schema:
    started = _operation_of("Start a stream that can be resumed", "streams", "201", "Started")
    body: Schema = {
        "type": "object",
        "properties": {
            "pipeline": {"type": "string"},
            "inputs": {"type": "object", "description": "As the body of the pipeline's own address"},
        },
        "required": ["pipeline", "inputs"],
        "additionalProperties": False,
    }
    started["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    started["responses"]["201"]["headers"] = {"Location": {"schema": {"type": "string"}}}
    return started


def _read_stream() -> Schema:
    read = _operation_of("Read a stream, or resume it", "streams", "200", "Events", path_parameter="id")
    read["parameters"].append({"name": "Last-Event-ID", "in": "header", "schema": {"type": "integer", "minimum": 1}})
    read["responses"]["200"]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    read["responses"]["204"] = {"description": "Nothing is left to read"}
    return read


_FIXED_PATHS: Schema = {
    "/v1/pipelines": _get("The pipelines", "catalog"),
    "/v1/pipelines/{pipeline}": _get(
        "One pipeline: fields, types, limits, samples", "catalog", path_parameter="pipeline"
    ),
    "/v1/streams": {"post": _start_stream()},
    "/v1/streams/{id}": {
        "get": _read_stream(),
        "delete": _operation_of("End a stream and forget it", "streams", "204", "Gone", path_parameter="id"),
    },
    "/health/live": _get("Whether the gateway answers", "health"),
    "/health/ready": _get("Whether the pipelines can be called", "health"),
}
