"""Describes the endpoints of pipelines, typed from their models' live configuration.

Each pipeline has its own operations, with the schemas of its request, its result and its output events.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from app.api import openapi
from app.api.error_table import Problem
from app.api.pipelines.catalog_endpoints import PipelineDescription
from app.api.pipelines.pipeline_endpoints import StreamStarted
from app.codecs.kinds import FILE_TYPES
from app.core import errors
from app.core.json import TEXT, Schema, const_of, enum_of, object_of, one_of
from app.pipelines import examples
from app.pipelines.pipeline import Pipeline
from app.streams.stream import Done

_BINARY: Schema = {"schema": {"type": "string", "format": "binary"}}
"""``format`` is the form of OpenAPI 3.0 for raw bytes. Generators know no other one."""
_LAST_EVENT_ID = openapi.header(
    "Last-Event-ID",
    {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    "The id of the last event that the client received; 0: from the start",
)
_ID = openapi.in_path("id", TEXT)
_STORE_ERRORS = errors.UnknownStream, errors.StreamEvicted, errors.ResumableStreamsOff, errors.UpstreamUnavailable


def tags_of(visible: openapi.Visible) -> Mapping[str, str]:
    return {each.name: each.spec.description or f"Model {each.spec.model}" for each in visible.pipelines} | {
        "catalog": "The pipelines, their numbers and their mistakes",
        "streams": "Streams that can be resumed",
    }


def request_of(pipeline: Pipeline) -> openapi.Named:
    def schema() -> Schema:
        """Moves each default into the schema of its type: openapi-typescript requires properties with a default."""
        request = examples.request_schema(pipeline)
        for described in request["properties"].values():
            if "default" in described:
                default = described.pop("default")
                branches = described.setdefault("anyOf", [{}])
                of_its_type = [each for each in branches if (each.get("type") == "array") == isinstance(default, list)]
                (of_its_type or branches)[0]["default"] = default
        return request

    return openapi.Named(f"{pipeline.name}_request", schema)


def result_of(pipeline: Pipeline) -> openapi.Named:
    return openapi.Named(f"{pipeline.name}_result", partial(examples.result_schema, pipeline))


def output_of(pipeline: Pipeline) -> openapi.Named:
    return openapi.Named(f"{pipeline.name}_output", partial(examples.event_schema, pipeline))


def events_answer(output: object, *headers: str) -> Schema:
    """``x-event-schemas`` has the types of a stream's events, which OpenAPI 3.1 cannot describe."""
    text = {"type": "string", "description": "Server-Sent Events. The data of each event is JSON."}
    content = {"schema": text, "x-event-schemas": {"output": output, "done": Done, "error": Problem}}
    described = "`output` events, then exactly one `done` or `error` event"
    return openapi.answer(described, {"text/event-stream": content}, *headers)


def content_of(pipeline: Pipeline) -> Schema:
    """The body of a request by media type."""
    example = _example(pipeline)
    content: Schema = {"application/json": {"schema": request_of(pipeline)}}
    if example is not None:
        content["application/json"]["examples"] = {"sample": {"summary": "A valid request", "value": example}}
    if any(field.takes_file for field in pipeline.inputs):
        # In a form, files, single texts and parameters are sent unchanged, and all other inputs as JSON.
        texts = {field.name for field in pipeline.inputs if field.spec.kind == "text" and field.is_bare}
        others = [each.name for each in pipeline.inputs if not (each.takes_file or each.name in texts)]
        encoding = {"encoding": {name: {"contentType": "application/json"} for name in others}} if others else {}
        content["multipart/form-data"] = {"schema": examples.form_schema(pipeline), **encoding}
    if (raw := pipeline.raw_field) is not None:
        of_images = [each for each in FILE_TYPES if each in ("image/*", "application/octet-stream")]
        content |= dict.fromkeys(of_images if raw.spec.kind == "image" else FILE_TYPES, _BINARY)
    return content


def _example(pipeline: Pipeline) -> Mapping[str, object] | None:
    """None if a tensor is too large for an example."""
    example = examples.example_of(pipeline)
    return None if any(isinstance(value, examples.Filled) for value in example.values()) else example


def describe(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    for each in visible.pipelines:
        ok = openapi.json_answer("The pipeline", PipelineDescription)
        possible = (errors.UnknownPipeline, errors.UpstreamUnavailable)
        yield openapi.Operation(f"describe_{each.name}", each.name, {200: ok}, possible, path=each.name)


def example(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    for each in visible.pipelines:
        if names := list(examples.declared_requests(each.spec)):
            ok = openapi.json_answer("A valid request, with its files", request_of(each))
            possible = (errors.UnknownPipeline, errors.UnknownExample, errors.ModelNotReady, errors.TooManyRequests)
            parameters = [openapi.in_path("example", enum_of(names))]
            yield openapi.Operation(f"example_{each.name}", each.name, {200: ok}, possible, parameters, path=each.name)


def run(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    for each in visible.pipelines:
        if each.spec.takes_requests:
            headers = ["X-Early-Exit"] if each.may_exit else []
            ok = openapi.json_answer("The outputs. An early exit has the same keys.", result_of(each), *headers)
            yield _run(each, "run", ok, is_repeatable=each.spec.idempotent)


def stream(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    for each in visible.pipelines:
        if each.spec.takes_requests and each.spec.stream is not None:
            yield _run(each, "stream", events_answer(output_of(each)))


def _run(pipeline: Pipeline, verb: str, ok: Schema, *, is_repeatable: bool = False) -> openapi.Operation:
    return openapi.Operation(
        f"{verb}_{pipeline.name}",
        pipeline.name,
        {200: ok},
        openapi.INFERENCE_ERRORS,
        [openapi.TIMEOUT_HEADER],
        content_of(pipeline),
        path=pipeline.name,
        is_repeatable=is_repeatable,
        summary=pipeline.spec.description or f"Run {pipeline.spec.model}",
    )


def links(*operations: str) -> Schema:
    return {"links": {name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in operations}}


def start_stream(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    streaming = [each for each in visible.pipelines if each.spec.stream is not None and each.spec.takes_requests]
    starts = [
        object_of({"pipeline": const_of(each.name), "inputs": request_of(each)}) | {"additionalProperties": False}
        for each in streaming
    ]
    valid = {
        each.name: {"summary": "A valid request", "value": {"pipeline": each.name, "inputs": inputs}}
        for each in streaming
        if (inputs := _example(each)) is not None
    }
    content = {"schema": one_of(starts) if starts else {}} | ({"examples": valid} if valid else {})
    started = openapi.json_answer("The stream has started", StreamStarted, "Location")
    yield openapi.Operation(
        "start_stream",
        "streams",
        {201: started | links("read_stream", "delete_stream")},
        (errors.UnknownPipeline, errors.ResumableStreamsOff, *openapi.INFERENCE_ERRORS),
        [openapi.TIMEOUT_HEADER],
        {"application/json": content},
        is_repeatable=True,
    )


READ_STREAM = openapi.Operation(
    "read_stream",
    "streams",
    {
        200: openapi.answer("The events after `Last-Event-ID`", events_answer({"type": "object"})["content"]),
        204: openapi.answer("The stream has ended and the client has received every event"),
    },
    _STORE_ERRORS,
    [_ID, _LAST_EVENT_ID],
)
DELETE_STREAM = openapi.Operation(
    "delete_stream", "streams", {204: openapi.answer("The stream has ended and was deleted")}, _STORE_ERRORS, [_ID]
)
