"""The operations of resumable streams."""

from collections.abc import Sequence

from app.api.openapi.answers import answer, json_answer, operation, problems
from app.api.openapi.inference import IDEMPOTENCY_HEADER, INFERENCE_ERRORS, TIMEOUT_HEADER
from app.api.pipelines.openapi.events import event_stream
from app.api.pipelines.openapi.explain_paths import EXPLAIN_HEADER
from app.api.pipelines.openapi.pipeline_paths import examples_of, schema_ref
from app.domain import errors
from app.domain.json_schema import Schema, const_of, one_of
from app.pipelines.pipeline import Pipeline

_TEXT: Schema = {"type": "string"}
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


def streams_path(pipelines: Sequence[Pipeline]) -> Schema:
    """Describes ``POST /v1/streams`` for the pipelines that stream."""
    streaming = [pipeline for pipeline in pipelines if pipeline.spec.stream is not None]
    schema = one_of([_start_schema(pipeline) for pipeline in streaming]) if streaming else {}
    examples = {pipeline.name: _start_example(pipeline) for pipeline in streaming if examples_of(pipeline)}
    started = json_answer("The stream has started", _STARTED, "Location") | {"links": _LINKS}
    answers = {"201": started, **problems(errors.UnknownPipeline, errors.ResumableStreamsOff, *INFERENCE_ERRORS)}
    summary = "Start a stream that can be resumed"
    description = "The stream runs without a connection. Read it at the address in `Location`, which needs no key."
    parameters = TIMEOUT_HEADER, IDEMPOTENCY_HEADER, EXPLAIN_HEADER
    described = operation("start_stream", "streams", summary, description, answers, *parameters)
    content = {"application/json": {"schema": schema, **({"examples": examples} if examples else {})}}
    return {"/v1/streams": {"post": described | {"requestBody": {"required": True, "content": content}}}}


_LINKS: Schema = {
    name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in ("read_stream", "delete_stream")
}


def _start_schema(pipeline: Pipeline) -> Schema:
    return {
        "type": "object",
        "required": ["pipeline", "inputs"],
        "properties": {"pipeline": const_of(pipeline.name), "inputs": schema_ref(pipeline, "request")},
        "additionalProperties": False,
    }


def _start_example(pipeline: Pipeline) -> Schema:
    sample = examples_of(pipeline)["examples"]["sample"]
    return {**sample, "value": {"pipeline": pipeline.name, "inputs": sample["value"]}}


_STORE_ERRORS = errors.UnknownStream, errors.StreamEvicted, errors.ResumableStreamsOff, errors.UpstreamUnavailable


def _read() -> Schema:
    answers = {
        "200": answer("The events after `Last-Event-ID`", event_stream({"type": "object"})),
        "204": answer("The stream has ended and the client has received every event"),
        **problems(*_STORE_ERRORS),
    }
    summary = "Read or resume a stream"
    description = "Sends the events after `Last-Event-ID`, those of the past at once. Several readers may read it."
    return operation("read_stream", "streams", summary, description, answers, _STREAM_ID, _LAST_EVENT_ID)


def _delete() -> Schema:
    answers = {
        "204": answer("The stream has ended and was deleted"),
        **problems(*_STORE_ERRORS),
    }
    description = "Cancels the work in Triton. The readers of the stream get its terminal event."
    return operation("delete_stream", "streams", "End and delete a stream", description, answers, _STREAM_ID)


STREAM_PATHS: Schema = {"/v1/streams/{id}": {"get": _read(), "delete": _delete()}}
