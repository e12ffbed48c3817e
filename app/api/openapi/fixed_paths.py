"""The operations that every gateway has: the catalog, resumable streams, and health."""

from collections.abc import Sequence

from app.api.openapi.answers import Schema, answer, event_stream, json_answer, problems
from app.api.openapi.pipeline_paths import INFERENCE_ERRORS, TIMEOUT_HEADER, examples_of, schema_ref
from app.domain import errors
from app.pipelines.form import State
from app.pipelines.pipeline import Pipeline

_TEXT: Schema = {"type": "string"}
_STATE: Schema = {"enum": [str(state) for state in State]}
_SUMMARY: Schema = {
    "type": "object",
    "required": ["name", "description", "model", "state", "state_detail", "streams", "url"],
    "properties": {
        "name": _TEXT,
        "description": _TEXT,
        "model": _TEXT,
        "state": _STATE,
        "state_detail": {"type": ["string", "null"], "description": "Why the pipeline is not ready"},
        "streams": {"type": "boolean"},
        "url": _TEXT,
    },
}
_PARTS = {"inputs": "array", "parameters": "array", "outputs": "array", "graph": "object", "early_exit": "array"}
_PARTS |= {"limits": "object", "schemas": "object", "sample": "object", "samples": "object"}
_DESCRIPTION: Schema = {
    "type": "object",
    "description": "Only the required properties until the pipeline's model is known",
    "required": _SUMMARY["required"],
    "properties": {**_SUMMARY["properties"], **{name: {"type": type_} for name, type_ in _PARTS.items()}},
}
_READINESS: Schema = {
    "type": "object",
    "required": ["status", "triton", "pipelines", "state_detail"],
    "properties": {
        "status": {"enum": ["ready", "not_ready", "draining"]},
        "triton": {"enum": ["up", "down"]},
        "pipelines": {"type": "object", "additionalProperties": _STATE},
        "state_detail": {"type": "object", "additionalProperties": _TEXT},
    },
}
_STARTED: Schema = {
    "type": "object",
    "required": ["id", "url", "request_id"],
    "properties": {"id": _TEXT, "url": _TEXT, "request_id": _TEXT},
}
_STREAM_ID: Schema = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
_LAST_EVENT_ID: Schema = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    "description": "The id of the last event that the client received; 0: from the start",
}


def _operation(operation_id: str, tag: str, summary: str, answers: Schema, *parameters: Schema) -> Schema:
    operation: Schema = {"operationId": operation_id, "summary": summary, "tags": [tag]}
    return operation | ({"parameters": list(parameters)} if parameters else {}) | {"responses": answers}


def _listed() -> Schema:
    pipelines = {"type": "array", "items": _SUMMARY}
    schema = {"type": "object", "required": ["pipelines"], "properties": {"pipelines": pipelines}}
    return {"200": json_answer("The pipelines", schema), **problems()}


def describe_operation(pipeline: Pipeline) -> Schema:
    """Each pipeline has a path of its own, where POST runs it."""
    answers = {"200": json_answer("The pipeline", _DESCRIPTION), **problems(errors.UnknownPipeline)}
    summary = "Fields, types, limits, graph and samples"
    return _operation(f"describe_{pipeline.name}", pipeline.name, summary, answers)


def streams_path(pipelines: Sequence[Pipeline]) -> Schema:
    """``POST /v1/streams`` for those pipelines that stream."""
    streaming = [pipeline for pipeline in pipelines if pipeline.spec.stream is not None]
    body = {"schema": {"oneOf": [_start_schema(pipeline) for pipeline in streaming]}} if streaming else {"schema": {}}
    examples = {pipeline.name: _start_example(pipeline) for pipeline in streaming if examples_of(pipeline)}
    started = json_answer("The stream has started", _STARTED, "Location") | {"links": _LINKS}
    answers = {"201": started, **problems(errors.UnknownPipeline, errors.ResumableStreamsOff, *INFERENCE_ERRORS)}
    operation = _operation("start_stream", "streams", "Start a stream that can be resumed", answers, TIMEOUT_HEADER)
    content = {"application/json": {**body, **({"examples": examples} if examples else {})}}
    return {"/v1/streams": {"post": operation | {"requestBody": {"required": True, "content": content}}}}


_LINKS: Schema = {
    name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in ("read_stream", "delete_stream")
}


def _start_schema(pipeline: Pipeline) -> Schema:
    return {
        "type": "object",
        "required": ["pipeline", "inputs"],
        "properties": {"pipeline": {"const": pipeline.name}, "inputs": schema_ref(pipeline, "request")},
        "additionalProperties": False,
    }


def _start_example(pipeline: Pipeline) -> Schema:
    sample = examples_of(pipeline)["examples"]["sample"]
    return {**sample, "value": {"pipeline": pipeline.name, "inputs": sample["value"]}}


_STORE_ERRORS = errors.UnknownStream, errors.ResumableStreamsOff, errors.UpstreamUnavailable


def _read() -> Schema:
    answers = {
        "200": answer("The events after `Last-Event-ID`", event_stream({"type": "object"})),
        "204": answer("The client has every event of a stream that has ended"),
        **problems(*_STORE_ERRORS, errors.StreamEvicted),
    }
    summary = "Read a stream, or resume it"
    return _operation("read_stream", "streams", summary, answers, _STREAM_ID, _LAST_EVENT_ID)


def _delete() -> Schema:
    answers = {
        "204": answer("The stream has ended, and is forgotten"),
        **problems(*_STORE_ERRORS),
    }
    return _operation("delete_stream", "streams", "End a stream and forget it", answers, _STREAM_ID)


def _live() -> Schema:
    schema: Schema = {"type": "object", "required": ["status"], "properties": {"status": {"const": "live"}}}
    return {"200": json_answer("The gateway answers", schema), **problems()}


def _ready() -> Schema:
    return {
        "200": json_answer("Every required pipeline can be called", _READINESS),
        **problems(),
        "503": json_answer("Triton or a required pipeline is not ready, or the gateway is draining", _READINESS),
    }


FIXED_PATHS: Schema = {
    "/v1/pipelines": {"get": _operation("list_pipelines", "catalog", "The pipelines", _listed())},
    "/v1/streams/{id}": {"get": _read(), "delete": _delete()},
    "/health/live": {"get": _operation("live", "health", "Whether the gateway answers", _live())},
    "/health/ready": {"get": _operation("ready", "health", "Whether the pipelines can be called", _ready())},
}
