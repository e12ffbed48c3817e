"""Describes the endpoints of pipelines, typed from their models' live configuration.

Each pipeline has its own operations, with the schemas of its request, its result and its output events.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from app.api.openapi import (
    INFERENCE_ERRORS,
    TIMEOUT_HEADER,
    Named,
    Operation,
    Visible,
    answer,
    header,
    in_path,
    json_answer,
)
from app.api.pipelines.answers import PipelineDescription, SessionOpened, StreamStarted
from app.api.problems import Problem
from app.codecs.kinds import FILE_TYPES
from app.core import errors
from app.core.json import TEXT, Schema, any_of, const_of, enum_of, object_of, one_of
from app.pipelines.examples import Filled, declared_requests, example_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import event_schema, form_schema, request_schema, result_schema
from app.streams.stream import Done

_BINARY: Schema = {"schema": {"type": "string", "format": "binary"}}
"""``format`` is the form of OpenAPI 3.0 for raw bytes. Generators know no other one."""
_IDEMPOTENCY_HEADER = header(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
    "A unique key, such as a UUID: a repeated request with the same body gets the first answer again.",
)
_LAST_EVENT_ID = header(
    "Last-Event-ID",
    {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    "The id of the last event that the client received; 0: from the start",
)
_STEP_HEADERS = (
    header(
        "X-Session-Step",
        {"type": "integer", "minimum": 1, "maximum": 10**15 - 1},
        "The number of the step, from 1: a repeated step gets the first answer again.",
    ),
    header("X-Session-End", enum_of(["true", "false"]), "`true`: the last step of the session"),
)
_ID = in_path("id", TEXT)
_SESSION_ERRORS = errors.UnknownSession, errors.SessionLost
_STORE_ERRORS = errors.UnknownStream, errors.StreamEvicted, errors.ResumableStreamsOff, errors.UpstreamUnavailable


def tags_of(visible: Visible) -> Mapping[str, str]:
    return {each.name: each.spec.description or f"Model {each.spec.model}" for each in visible.pipelines} | {
        "catalog": "The pipelines, their numbers and their mistakes",
        "streams": "Streams that can be resumed",
        "sessions": "Steps of models with a state",
    }


def _request(pipeline: Pipeline) -> Named:
    return Named(f"{pipeline.name}_request", lambda: _with_optional_defaults(request_schema(pipeline)))


def _result(pipeline: Pipeline) -> Named:
    return Named(f"{pipeline.name}_result", partial(result_schema, pipeline))


def _output(pipeline: Pipeline) -> Named:
    return Named(f"{pipeline.name}_output", partial(event_schema, pipeline))


def _with_optional_defaults(schema: Schema) -> Schema:
    """Moves each default into the schema of its type: openapi-typescript requires properties that have a default."""
    for described in schema["properties"].values():
        if "default" in described:
            default = described.pop("default")
            branches = described.setdefault("anyOf", [{}])
            of_its_type = [each for each in branches if (each.get("type") == "array") == isinstance(default, list)]
            (of_its_type or branches)[0]["default"] = default
    return schema


def _events(output: object, *headers: str) -> Schema:
    """``x-event-schemas`` has the types of a stream's events, which OpenAPI 3.1 cannot describe."""
    text = {"type": "string", "description": "Server-Sent Events. The data of each event is JSON."}
    content = {"schema": text, "x-event-schemas": {"output": output, "done": Done, "error": Problem}}
    described = "`output` events, then exactly one `done` or `error` event"
    return answer(described, {"text/event-stream": content}, *headers)


def _content(pipeline: Pipeline) -> Schema:
    """The body of a request by media type."""
    example = _example(pipeline)
    examples = {"examples": {"sample": {"summary": "A valid request", "value": example}}} if example is not None else {}
    content: Schema = {"application/json": {"schema": _request(pipeline), **examples}}
    if any(field.takes_file for field in pipeline.inputs):
        content["multipart/form-data"] = {"schema": form_schema(pipeline), **_encoding(pipeline)}
    if (raw := pipeline.raw_field) is not None:
        of_images = [each for each in FILE_TYPES if each in ("image/*", "application/octet-stream")]
        content |= dict.fromkeys(of_images if raw.spec.kind == "image" else FILE_TYPES, _BINARY)
    return content


def _example(pipeline: Pipeline) -> Mapping[str, object] | None:
    """None if a tensor is too large for an example."""
    example = example_of(pipeline)
    return None if any(isinstance(value, Filled) for value in example.values()) else example


def _encoding(pipeline: Pipeline) -> Schema:
    """In a form, files, single texts and parameters are sent unchanged, and all other inputs as JSON."""
    plain = (field.takes_file or (field.spec.kind == "text" and field.is_bare) for field in pipeline.inputs)
    others = [field.name for field, is_plain in zip(pipeline.inputs, plain, strict=True) if not is_plain]
    return {"encoding": {name: {"contentType": "application/json"} for name in others}} if others else {}


def describe(visible: Visible) -> Iterator[Operation]:
    for each in visible.pipelines:
        ok = json_answer("The pipeline", PipelineDescription)
        possible = (errors.UnknownPipeline, errors.UpstreamUnavailable)
        yield Operation(f"describe_{each.name}", each.name, {200: ok}, possible, path=each.name)


def example(visible: Visible) -> Iterator[Operation]:
    for each in visible.pipelines:
        if names := list(declared_requests(each.spec)):
            ok = json_answer("A valid request, with its files", _request(each))
            possible = (errors.UnknownPipeline, errors.UnknownExample, errors.ModelNotReady, errors.TooManyRequests)
            parameters = [in_path("example", enum_of(names))]
            yield Operation(f"example_{each.name}", each.name, {200: ok}, possible, parameters, path=each.name)


def run(visible: Visible) -> Iterator[Operation]:
    for each in visible.pipelines:
        if each.session is None:
            headers = ["X-Early-Exit"] if each.rules else []
            ok = json_answer("The outputs. An early exit has the same keys.", _result(each), *headers)
            described = _run(each, "run", ok, [TIMEOUT_HEADER])
            yield _repeatable(described) if each.spec.idempotent else described


def stream(visible: Visible) -> Iterator[Operation]:
    for each in visible.pipelines:
        if each.session is None and each.spec.stream is not None:
            yield _run(each, "stream", _events(_output(each)), [TIMEOUT_HEADER])


def _run(pipeline: Pipeline, verb: str, ok: Schema, parameters: Sequence[Schema]) -> Operation:
    return Operation(
        f"{verb}_{pipeline.name}",
        pipeline.name,
        {200: ok},
        INFERENCE_ERRORS,
        parameters,
        _content(pipeline),
        path=pipeline.name,
        summary=pipeline.spec.description or f"Run {pipeline.spec.model}",
    )


def _repeatable(operation: Operation) -> Operation:
    possible = (*operation.errors, errors.IdempotencyKeyReused)
    return replace(operation, parameters=[*operation.parameters, _IDEMPOTENCY_HEADER], errors=possible)


def _links(*operations: str) -> Schema:
    return {"links": {name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in operations}}


def start_stream(visible: Visible) -> Iterator[Operation]:
    streaming = [each for each in visible.pipelines if each.spec.stream is not None and each.session is None]
    starts = [
        object_of({"pipeline": const_of(each.name), "inputs": _request(each)}) | {"additionalProperties": False}
        for each in streaming
    ]
    examples = {
        each.name: {"summary": "A valid request", "value": {"pipeline": each.name, "inputs": inputs}}
        for each in streaming
        if (inputs := _example(each)) is not None
    }
    content = {"schema": one_of(starts) if starts else {}} | ({"examples": examples} if examples else {})
    started = json_answer("The stream has started", StreamStarted, "Location")
    described = Operation(
        "start_stream",
        "streams",
        {201: started | _links("read_stream", "delete_stream")},
        (errors.UnknownPipeline, errors.ResumableStreamsOff, *INFERENCE_ERRORS),
        [TIMEOUT_HEADER],
        {"application/json": content},
    )
    yield _repeatable(described)


READ_STREAM = Operation(
    "read_stream",
    "streams",
    {
        200: answer("The events after `Last-Event-ID`", _events({"type": "object"})["content"]),
        204: answer("The stream has ended and the client has received every event"),
    },
    _STORE_ERRORS,
    [_ID, _LAST_EVENT_ID],
)
DELETE_STREAM = Operation(
    "delete_stream", "streams", {204: answer("The stream has ended and was deleted")}, _STORE_ERRORS, [_ID]
)


def open_session(visible: Visible) -> Iterator[Operation]:
    possible = (
        *(errors.UnknownPipeline, errors.TooManyRequests),
        *(errors.ModelNotReady, errors.UpstreamUnavailable, errors.Draining, errors.HttpSessionsOff),
    )
    opened = json_answer("The session is open", SessionOpened, "Location") | _links("run_step", "delete_session")
    for each in _stateful(visible):
        summary = each.spec.description or f"Open a session of {each.spec.model}"
        yield Operation(
            f"open_session_{each.name}", each.name, {201: opened}, possible, path=each.name, summary=summary
        )


def run_step(visible: Visible) -> Iterator[Operation]:
    if stateful := _stateful(visible):
        described, headers = "The outputs of the session's pipeline", ("X-Session-Step", "X-Session-Expires-In")
        yield _step("run_step", stateful, json_answer(described, any_of([*map(_result, stateful)]), *headers))


def stream_step(visible: Visible) -> Iterator[Operation]:
    if streaming := [each for each in _stateful(visible) if each.spec.stream is not None]:
        yield _step("stream_step", streaming, _events(any_of([*map(_output, streaming)]), "X-Session-Step"))


def delete_session(visible: Visible) -> Iterator[Operation]:
    if _stateful(visible):
        ended = {204: answer("The session has ended")}
        yield Operation("delete_session", "sessions", ended, _SESSION_ERRORS, [_ID])


def _stateful(visible: Visible) -> Sequence[Pipeline]:
    return [each for each in visible.pipelines if each.session is not None]


def _step(name: str, pipelines: Sequence[Pipeline], ok: Schema) -> Operation:
    content = {name: each for pipeline in pipelines for name, each in _content(pipeline).items()}
    content["application/json"] = {"schema": any_of([*map(_request, pipelines)])}
    possible = (*_SESSION_ERRORS, errors.StepOutOfTurn, *INFERENCE_ERRORS)
    return Operation(name, "sessions", {200: ok}, possible, [_ID, TIMEOUT_HEADER, *_STEP_HEADERS], content)
