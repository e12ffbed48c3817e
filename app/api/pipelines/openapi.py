"""Describes the pipelines in the OpenAPI document, typed from their models' live configuration.

Each pipeline has its own operations, with the schemas of its request, its result and its output events. The other
operations are the catalog, the statistics and findings of all pipelines, resumable streams, and the steps of sessions.
"""

from collections.abc import Sequence

from app.admission.keys import Key
from app.api.access import allows_pipeline
from app.api.openapi.answers import (
    IDEMPOTENCY_HEADER,
    INFERENCE_ERRORS,
    REFUSALS,
    TIMEOUT_HEADER,
    answer,
    json_answer,
    operation,
    problems,
    ref,
    schemas_of,
)
from app.api.openapi.document import Described
from app.api.pipelines.answers import FindingList, PipelineDescription, PipelineList
from app.api.pipelines.sessions import SessionOpened
from app.api.pipelines.streams import StreamStarted
from app.codecs.kinds import FILE_TYPES
from app.core import errors
from app.core.json import TEXT, Schema, any_of, const_of, enum_of, object_of, one_of
from app.observability.statistics import Statistics
from app.pipelines.catalog import Catalog
from app.pipelines.examples import Filled, declared_requests, example_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import event_schema, form_schema, request_schema, result_schema
from app.streams.stream import Done


def event_stream(output: Schema) -> Schema:
    """Describes a stream as text with ``x-event-schemas``, because OpenAPI 3.1 cannot type the events of a stream.

    ``output``: the schema of the data of an ``output`` event.
    """
    return {
        "text/event-stream": {
            "schema": {"type": "string", "description": "Server-Sent Events. The data of each event is JSON."},
            "x-event-schemas": {
                "output": output,
                "done": ref(Done.__name__),
                "error": ref("Problem"),
            },
        }
    }


_STATISTICS_ANSWERS = {"200": json_answer("The numbers of each pipeline", Statistics), **problems()}
_FINDINGS_ANSWERS = {"200": json_answer("The findings", FindingList), **problems(errors.UpstreamUnavailable)}

OVERVIEW_PATHS: Schema = {
    "/v1/statistics": {
        "get": operation(
            "statistics",
            "catalog",
            "Requests and durations of each pipeline",
            "Counters since the start of the gateway, summed over its processes. Subtract two answers for rates.",
            _STATISTICS_ANSWERS,
        )
    },
    "/v1/findings": {
        "get": operation(
            "findings",
            "catalog",
            "What `triton-gateway check` finds in the models",
            "Mistakes in the running models and in gateway.yaml, each with its solution.",
            _FINDINGS_ANSWERS,
        )
    },
}


def describe_operation(pipeline: Pipeline) -> Schema:
    """Each pipeline has its own path, where POST runs it."""
    answers = {
        "200": json_answer("The pipeline", PipelineDescription),
        **problems(errors.UnknownPipeline, errors.UpstreamUnavailable),
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
            {"200": json_answer("The pipelines", PipelineList), **problems(errors.UpstreamUnavailable)},
        )
    }
}


_BINARY: Schema = {"schema": {"type": "string", "format": "binary"}}
"""``format`` is the form of OpenAPI 3.0 for raw bytes. Generators know no other one."""
_DESCRIPTIONS = {
    "run": "Answers when the model has sent all of its responses. A request with a file may be a form, and a request "
    "of one file may be its bytes.",
    "stream": "Sends each response of the model as an event. The stream depends on this connection: a repeated request "
    "with `Last-Event-ID` gets 400. `POST /v1/streams` starts streams that can be resumed.",
}


def model_schemas_of(pipeline: Pipeline) -> Schema:
    schemas = {"request": _with_optional_defaults(request_schema(pipeline)), "result": result_schema(pipeline)}
    if pipeline.spec.stream is not None:
        schemas["output"] = event_schema(pipeline)
    return {f"{pipeline.name}_{what}": schema for what, schema in schemas.items()}


def _with_optional_defaults(schema: Schema) -> Schema:
    """Moves each default into the schema of its type: openapi-typescript requires properties that have a default."""
    for described in schema["properties"].values():
        if "default" in described:
            default = described.pop("default")
            branches = described.setdefault("anyOf", [{}])
            of_its_type = [each for each in branches if (each.get("type") == "array") == isinstance(default, list)]
            (of_its_type or branches)[0]["default"] = default
    return schema


def schema_ref(pipeline: Pipeline, what: str) -> Schema:
    return ref(f"{pipeline.name}_{what}")


def paths_of(pipeline: Pipeline) -> Schema:
    path = f"/v1/pipelines/{pipeline.name}"
    names = ["X-Early-Exit"] if pipeline.rules else []
    result = json_answer("The outputs. An early exit has the same keys.", schema_ref(pipeline, "result"), *names)
    paths = {path: {"get": describe_operation(pipeline)}}
    if pipeline.session is None:
        paths[path]["post"] = _operation(pipeline, "run", result)
    else:
        paths[f"{path}/sessions"] = {"post": _open_session(pipeline)}
    if names_of_examples := list(declared_requests(pipeline.spec)):
        example = example_operation(pipeline, names_of_examples, schema_ref(pipeline, "request"))
        paths[f"{path}/examples/{{example}}"] = {"get": example}
    if pipeline.spec.stream is not None and pipeline.session is None:
        paths[f"{path}/stream"] = {"post": _operation(pipeline, "stream", _events(schema_ref(pipeline, "output")))}
    return paths


def _events(output: Schema, *names: str) -> Schema:
    """``names``: of headers."""
    return answer("`output` events, then exactly one `done` or `error` event", event_stream(output), *names)


def _operation(pipeline: Pipeline, verb: str, ok: Schema) -> Schema:
    repeats = [IDEMPOTENCY_HEADER] if verb == "run" and pipeline.spec.idempotent else []
    return {
        "operationId": f"{verb}_{pipeline.name}",
        "summary": pipeline.spec.description or f"Run {pipeline.spec.model}",
        "description": _DESCRIPTIONS[verb],
        "tags": [pipeline.name],
        "parameters": [TIMEOUT_HEADER, *repeats],
        "requestBody": {"required": True, "content": _request_content(pipeline)},
        "responses": {"200": ok, **problems(*INFERENCE_ERRORS)},
    }


def _request_content(pipeline: Pipeline) -> Schema:
    content: Schema = {"application/json": {"schema": schema_ref(pipeline, "request"), **examples_of(pipeline)}}
    if any(field.takes_file for field in pipeline.inputs):
        content["multipart/form-data"] = {"schema": form_schema(pipeline), **_encoding_of(pipeline)}
    if (raw := pipeline.raw_field) is not None:
        of_images = [each for each in FILE_TYPES if each in ("image/*", "application/octet-stream")]
        content |= dict.fromkeys(of_images if raw.spec.kind == "image" else FILE_TYPES, _BINARY)
    return content


def _encoding_of(pipeline: Pipeline) -> Schema:
    """In a form, files, single texts and parameters are sent unchanged, and all other inputs as JSON."""
    plain = {
        field.name for field in pipeline.inputs if field.takes_file or (field.spec.kind == "text" and field.is_bare)
    }
    others = [field.name for field in pipeline.inputs if field.name not in plain]
    return {"encoding": {name: {"contentType": "application/json"} for name in others}} if others else {}


def examples_of(pipeline: Pipeline) -> Schema:
    """Returns None if a tensor is too large for an example."""
    example = example_of(pipeline)
    if any(isinstance(value, Filled) for value in example.values()):
        return {}
    return {"examples": {"sample": {"summary": "A valid request", "value": example}}}


def _open_session(pipeline: Pipeline) -> Schema:
    opened = json_answer("The session is open", SessionOpened, "Location") | {"links": _SESSION_LINKS}
    possible = (
        *(errors.UnknownPipeline, errors.TooManyRequests),
        *(errors.ModelNotReady, errors.UpstreamUnavailable, errors.Draining, errors.HttpSessionsOff),
    )
    answers = {"201": opened, **problems(*possible)}
    summary = pipeline.spec.description or f"Open a session of {pipeline.spec.model}"
    description = "Each request to the address in `Location` is a step of one sequence of the model."
    return operation(f"open_session_{pipeline.name}", pipeline.name, summary, description, answers)


_SESSION_LINKS: Schema = {
    name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in ("run_step", "delete_session")
}
_SESSION_ERRORS = errors.UnknownSession, errors.SessionLost
_SESSION_ID: Schema = {"name": "id", "in": "path", "required": True, "schema": TEXT}
_STEP_HEADERS: Sequence[Schema] = (
    {
        "name": "X-Session-Step",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10**15 - 1},
        "description": "The number of the step, from 1: a repeated step gets the first answer again.",
    },
    {
        "name": "X-Session-End",
        "in": "header",
        "schema": {"type": "string", "enum": ["true", "false"]},
        "description": "`true`: the last step of the session",
    },
)


def session_paths(pipelines: Sequence[Pipeline]) -> Schema:
    """Describes the steps of the pipelines with sessions; empty without one."""
    stateful = [pipeline for pipeline in pipelines if pipeline.session is not None]
    streaming = [pipeline for pipeline in stateful if pipeline.spec.stream is not None]
    paths = {"/v1/sessions/{id}": {"post": _run_step(stateful), "delete": _delete_session()}} if stateful else {}
    return paths | ({"/v1/sessions/{id}/stream": {"post": _stream_step(streaming)}} if streaming else {})


def _run_step(stateful: Sequence[Pipeline]) -> Schema:
    result = json_answer(
        "The outputs of the session's pipeline",
        any_of([schema_ref(pipeline, "result") for pipeline in stateful]),
        *("X-Session-Step", "X-Session-Expires-In"),
    )
    description = "Steps run in order, one at a time. The body and the answer are those of the session's pipeline."
    return _step(stateful, "run_step", "Run a step of a session", description, result)


def _stream_step(streaming: Sequence[Pipeline]) -> Schema:
    events = _events(any_of([schema_ref(pipeline, "output") for pipeline in streaming]), "X-Session-Step")
    description = "The step runs to its end, also if the client leaves. A repeated step is 409."
    return _step(streaming, "stream_step", "Run a step of a session as a stream", description, events)


def _step(stateful: Sequence[Pipeline], name: str, summary: str, description: str, ok: Schema) -> Schema:
    content = {name: each for pipeline in stateful for name, each in _request_content(pipeline).items()}
    content["application/json"] = {"schema": any_of([schema_ref(pipeline, "request") for pipeline in stateful])}
    answers = {"200": ok, **problems(*_SESSION_ERRORS, errors.StepOutOfTurn, *INFERENCE_ERRORS)}
    parameters = _SESSION_ID, TIMEOUT_HEADER, *_STEP_HEADERS
    described = operation(name, "sessions", summary, description, answers, *parameters)
    return described | {"requestBody": {"required": True, "content": content}}


def _delete_session() -> Schema:
    answers = {"204": answer("The session has ended"), **problems(*_SESSION_ERRORS)}
    description = "A running step runs to its end."
    return operation("delete_session", "sessions", "End a session", description, answers, _SESSION_ID)


_STREAM_ID: Schema = {"name": "id", "in": "path", "required": True, "schema": TEXT}
_LAST_EVENT_ID: Schema = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    "description": "The id of the last event that the client received; 0: from the start",
}


def streams_path(pipelines: Sequence[Pipeline]) -> Schema:
    """Describes ``POST /v1/streams`` for the pipelines that stream."""
    streaming = [each for each in pipelines if each.spec.stream is not None and each.session is None]
    schema = one_of([_start_schema(pipeline) for pipeline in streaming]) if streaming else {}
    examples = {pipeline.name: _start_example(pipeline) for pipeline in streaming if examples_of(pipeline)}
    started = json_answer("The stream has started", StreamStarted, "Location") | {"links": _LINKS}
    answers = {"201": started, **problems(errors.UnknownPipeline, errors.ResumableStreamsOff, *INFERENCE_ERRORS)}
    summary = "Start a stream that can be resumed"
    description = "The stream runs without a connection. Read it at the address in `Location`, which needs no key."
    parameters = TIMEOUT_HEADER, IDEMPOTENCY_HEADER
    described = operation("start_stream", "streams", summary, description, answers, *parameters)
    content = {"application/json": {"schema": schema, **({"examples": examples} if examples else {})}}
    return {"/v1/streams": {"post": described | {"requestBody": {"required": True, "content": content}}}}


_LINKS: Schema = {
    name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in ("read_stream", "delete_stream")
}


def _start_schema(pipeline: Pipeline) -> Schema:
    properties = {"pipeline": const_of(pipeline.name), "inputs": schema_ref(pipeline, "request")}
    return object_of(properties) | {"additionalProperties": False}


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


ANSWERS = schemas_of(PipelineList, PipelineDescription, Statistics, FindingList, StreamStarted, Done)
_TAGS = {
    "catalog": "The pipelines, their numbers and their mistakes",
    "streams": "Streams that can be resumed",
    "sessions": "Steps of models with a state",
}


def described(catalog: Catalog, key: Key | None) -> Described:
    entries = catalog.entries.items()
    pipelines = [entry.pipeline for name, entry in entries if entry.pipeline and allows_pipeline(key, name)]
    paths: Schema = {}
    schemas: Schema = dict(ANSWERS)
    for pipeline in pipelines:
        paths |= paths_of(pipeline)
        schemas |= model_schemas_of(pipeline)
    paths |= {**CATALOG_PATHS, **OVERVIEW_PATHS, **streams_path(pipelines), **STREAM_PATHS}
    if of_sessions := session_paths(pipelines):
        paths |= of_sessions
        schemas |= schemas_of(SessionOpened)
    tags = _TAGS | {each.name: each.spec.description or f"Model {each.spec.model}" for each in pipelines}
    return Described(paths, schemas, REFUSALS, bearer_paths=list(STREAM_PATHS), tags=tags)
