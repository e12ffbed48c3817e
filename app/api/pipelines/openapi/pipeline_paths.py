"""The operations of one pipeline, and the schemas of its request, its result and its output events."""

from app.api.openapi.answers import answer, json_answer, problems
from app.api.openapi.inference import IDEMPOTENCY_HEADER, INFERENCE_ERRORS, TIMEOUT_HEADER
from app.api.pipelines.openapi.catalog_paths import describe_operation, example_operation
from app.api.pipelines.openapi.events import event_stream
from app.api.pipelines.openapi.explain_paths import EXPLAIN_HEADER
from app.domain.json_schema import Schema
from app.pipelines.declared import declared_requests
from app.pipelines.example import Filled, example_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import event_schema, form_schema, request_schema, result_schema

_BINARY: Schema = {"schema": {"type": "string", "format": "binary"}}
"""``format`` is the form of OpenAPI 3.0 for raw bytes. Generators know no other one."""
_DESCRIPTIONS = {
    "run": "Answers when the model has sent all of its responses. A request with a file may be a form, and a request "
    "of one file may be its bytes.",
    "stream": "Sends each response of the model as an event. The stream depends on this connection: a repeated request "
    "with `Last-Event-ID` gets 400. `POST /v1/streams` starts streams that can be resumed.",
}


def schemas_of(pipeline: Pipeline) -> Schema:
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
    return {"$ref": f"#/components/schemas/{pipeline.name}_{what}"}


def paths_of(pipeline: Pipeline) -> Schema:
    path = f"/v1/pipelines/{pipeline.name}"
    names = ["X-Early-Exit"] if pipeline.rules else []
    result = json_answer("The outputs. An early exit has the same keys.", schema_ref(pipeline, "result"), *names)
    paths = {path: {"get": describe_operation(pipeline), "post": _operation(pipeline, "run", result)}}
    if names_of_examples := list(declared_requests(pipeline.spec)):
        example = example_operation(pipeline, names_of_examples, schema_ref(pipeline, "request"))
        paths[f"{path}/examples/{{example}}"] = {"get": example}
    if pipeline.spec.stream is not None:
        events = event_stream(schema_ref(pipeline, "output"))
        stream = answer("`output` events, then exactly one `done` or `error` event", events)
        paths[f"{path}/stream"] = {"post": _operation(pipeline, "stream", stream)}
    return paths


def _operation(pipeline: Pipeline, verb: str, ok: Schema) -> Schema:
    repeats = [IDEMPOTENCY_HEADER] if verb == "run" and pipeline.spec.idempotent else []
    return {
        "operationId": f"{verb}_{pipeline.name}",
        "summary": pipeline.spec.description or f"Run {pipeline.spec.model}",
        "description": _DESCRIPTIONS[verb],
        "tags": [pipeline.name],
        "parameters": [TIMEOUT_HEADER, *repeats, EXPLAIN_HEADER],
        "requestBody": {"required": True, "content": _request_content(pipeline)},
        "responses": {"200": ok, **problems(*INFERENCE_ERRORS)},
    }


def _request_content(pipeline: Pipeline) -> Schema:
    content: Schema = {"application/json": {"schema": schema_ref(pipeline, "request"), **examples_of(pipeline)}}
    files = [field for field in pipeline.inputs if field.is_file]
    if files:
        content["multipart/form-data"] = {"schema": form_schema(pipeline), **_encoding_of(pipeline)}
    if len(files) == 1 and not any(field.is_required for field in pipeline.inputs if not field.is_file):
        kinds = ["image/*"] if files[0].spec.kind == "image" else []
        content |= dict.fromkeys([*kinds, "application/octet-stream"], _BINARY)
    return content


def _encoding_of(pipeline: Pipeline) -> Schema:
    """In a form, files, single texts and parameters are sent unchanged, and all other inputs as JSON."""
    plain = {field.name for field in pipeline.inputs if field.is_file or (field.spec.kind == "text" and field.is_bare)}
    others = [field.name for field in pipeline.inputs if field.name not in plain]
    return {"encoding": {name: {"contentType": "application/json"} for name in others}} if others else {}


def examples_of(pipeline: Pipeline) -> Schema:
    """Returns None if a tensor is too large for an example."""
    example = example_of(pipeline)
    if any(isinstance(value, Filled) for value in example.values()):
        return {}
    return {"examples": {"sample": {"summary": "A valid request", "value": example}}}
