"""Describes ``/v2`` in the OpenAPI document, for the currently exposed models.

It has the inference operations of each model, with request schemas of its own, and the read-only operations for the
server and for its models. Each operation of a model also exists under ``/versions/{version}``. All models share the
other schemas.
"""

import re
from collections.abc import Sequence

import numpy as np

from app.admission.keys import Key
from app.api.access import allows_model
from app.api.error_table import ROW_BY_ERROR
from app.api.oip.errors import status_of_kind
from app.api.oip.infer import MAX_ID
from app.api.oip.parameters import MAX_NAME, MAX_PARAMETERS, MAX_TEXT
from app.api.openapi.answers import (
    ANYWHERE,
    INFERENCE_ERRORS,
    REFUSED,
    TIMEOUT_HEADER,
    answer,
    headers_of_errors,
    json_answer,
    operation,
    ref,
)
from app.api.openapi.document import Described
from app.codecs.kinds import LARGEST_BY_DATATYPE
from app.core import errors
from app.core.errors import GatewayError
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, INTEGER_DATATYPES
from app.core.json import COUNT, TEXT, Schema, const_of, enum_of, list_of, object_of, one_of
from app.core.model import ModelConfig, TensorSpec
from app.pipelines.catalog import Catalog

MODEL_STATUSES = (400, 404, 500, 501, 503)
"""Statuses of errors of a model."""


def error_answers(*possible: type[GatewayError], of_model: bool = False) -> Schema:
    """Returns the errors of ``/v2`` by status."""
    kinds = (*possible, *ANYWHERE, errors.UpstreamUnavailable, errors.DeadlineExceeded)
    statuses = {*map(status_of_kind, kinds), *(MODEL_STATUSES if of_model else ())}
    return {str(status): {"$ref": "#/components/responses/OipError"} for status in sorted(statuses)}


def stream_error_answers(*possible: type[GatewayError]) -> Schema:
    """Errors of the model before the first response are events."""
    return error_answers(*possible) | {"400": {"$ref": "#/components/responses/OipStreamError"}}


_ERROR = json_answer("An error. With 429 and 503 `Retry-After` may say when to retry.", ref("OipError"))
_EVENT: Schema = {"text/event-stream": {"schema": TEXT, "x-event-schemas": {"message": ref("OipError")}}}

REFUSALS: Schema = {
    str(status_of_kind(error)): json_answer(ROW_BY_ERROR[error].meaning, ref("OipError"), *headers_of_errors([error]))
    for error in REFUSED
}
RESPONSES: Schema = {
    "OipError": _ERROR,
    "OipStreamError": _ERROR | {"content": _ERROR["content"] | _EVENT},
}


_SHAPE: Schema = {"type": "array", "items": {"type": "integer", "minimum": -1}}
_VALUE: Schema = {"type": ["boolean", "number", "string", "null"]}
_PARAMETERS: Schema = {
    "propertyNames": {
        "pattern": "^(?!(triton_|sequence_|shared_memory_)|(priority|timeout|headers|binary_data|binary_data_output|"
        f"classification|traceparent)$)[ -~]{{1,{MAX_NAME}}}$"
    },
    "additionalProperties": {
        "type": ["boolean", "number", "string"],
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
        "maxLength": MAX_TEXT,
        "pattern": "^[^\\u0000]*$",
    },
    "maxProperties": MAX_PARAMETERS,
}


_METADATA_TENSOR = object_of({"name": TEXT, "datatype": TEXT, "shape": _SHAPE})
_OUTPUT = object_of(
    {
        "name": TEXT,
        "datatype": enum_of(DTYPE_BY_DATATYPE),
        "shape": list_of(COUNT),
        "data": list_of(_VALUE),
        "parameters": object_of({"binary_data_size": COUNT}),
    },
    "data",
    "parameters",
)

SCHEMAS: Schema = {
    "OipError": object_of({"error": TEXT}),
    "OipServer": object_of({"name": TEXT, "version": TEXT, "extensions": list_of(TEXT)}),
    "OipIndex": list_of(
        object_of({"name": TEXT, "version": TEXT, "state": enum_of(["READY", "UNAVAILABLE"])}),
    ),
    "OipModel": object_of(
        {
            "name": TEXT,
            "versions": list_of(TEXT),
            "platform": TEXT,
            "inputs": list_of(_METADATA_TENSOR),
            "outputs": list_of(_METADATA_TENSOR),
        }
    ),
    "OipConfig": object_of({"name": TEXT, "max_batch_size": COUNT, "input": list_of({}), "output": list_of({})}),
    "OipStatistics": object_of({"model_stats": list_of(object_of({"name": TEXT, "version": TEXT}))}),
    "OipInferResult": object_of(
        {"id": TEXT, "model_name": TEXT, "model_version": TEXT, "outputs": list_of(_OUTPUT)}, "id"
    ),
}


def infer_request(config: ModelConfig) -> Schema:
    """OpenAPI cannot describe the binary tensors after the JSON."""
    inputs = [_input(spec, config.max_batch_size) for spec in config.inputs]
    outputs = object_of({"name": enum_of(spec.name for spec in config.outputs)})
    listed: Schema = {"type": "array", "items": one_of(inputs) if inputs else {}}
    required = [spec for spec in config.inputs if not spec.optional]
    listed |= {"minItems": len(required), "maxItems": len(inputs)}
    if required:
        listed["allOf"] = [{"contains": object_of({"name": const_of(spec.name)})} for spec in required]
    return object_of(
        {"id": {**TEXT, "maxLength": MAX_ID}, "inputs": listed, "outputs": list_of(outputs)}, "id", "outputs"
    )


def _input(spec: TensorSpec, max_batch_size: int) -> Schema:
    batch = [{"type": "integer", "minimum": 1, "maximum": max_batch_size}] if max_batch_size else []
    dims = [*batch, *map(_dimension, spec.dims)]
    shape = {**list_of({"type": "integer"}), "prefixItems": dims, "minItems": len(dims), "maxItems": len(dims)}
    data = list_of(_element(spec.datatype))
    return object_of({"name": const_of(spec.name), "datatype": const_of(spec.datatype), "shape": shape, "data": data})


def _dimension(dim: int) -> Schema:
    return {**COUNT, "maximum": 2**63 - 1} if dim == -1 else const_of(dim)


def _element(datatype: str) -> Schema:
    if datatype in INTEGER_DATATYPES:
        limits = np.iinfo(DTYPE_BY_DATATYPE[datatype])
        return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    if datatype in {BYTES, "BOOL"}:
        return {"type": "string" if datatype == BYTES else "boolean"}
    largest = LARGEST_BY_DATATYPE.get(datatype) if datatype != "FP64" else None
    return {"type": "number"} | ({} if largest is None else {"minimum": -largest, "maximum": largest})


def generate_request(config: ModelConfig) -> Schema:
    """Members that are not inputs are request parameters.

    Not ``additionalProperties``: orval makes an index signature of it, which the inputs do not fit.
    """
    fields = {spec.name: _one_or_list(_element(spec.datatype)) for spec in config.inputs}
    optional = [spec.name for spec in config.inputs if spec.optional]
    members = {**fields, "id": {**TEXT, "maxLength": MAX_ID}, "parameters": {"type": "object", **_PARAMETERS}}
    schema = object_of(members, *optional, "id", "parameters") | _PARAMETERS
    named = "|".join(re.sub(r"[\\^$.*+?()\[\]{}|]", r"\\\g<0>", name) for name in members)
    return schema | {"patternProperties": {f"^(?!({named})$)": schema.pop("additionalProperties")}}


def generate_result(config: ModelConfig) -> Schema:
    fields = {spec.name: {"anyOf": [_VALUE, list_of(_VALUE)]} for spec in config.outputs}
    named = {"id": TEXT, "model_name": TEXT, "model_version": TEXT}
    return object_of({**fields, **named}, *fields, "id")


def _one_or_list(element: Schema) -> Schema:
    return {"anyOf": [element, list_of(element)]}


_POSSIBLE = (*INFERENCE_ERRORS, errors.UnknownModel)
_OF_MODEL = error_answers(*_POSSIBLE, of_model=True)
_OF_GENERATION = error_answers(*_POSSIBLE)
_OF_STREAM = stream_error_answers(*_POSSIBLE)

_DESCRIPTIONS = {
    "infer": "The Open Inference Protocol: tensors as JSON, or as binary data after the JSON.",
    "generate": "Triton's generate extension: inputs by name, and one response.",
    "generate_stream": "Triton's generate extension: inputs by name, and each response as an event.",
}


def schemas_of(config: ModelConfig) -> Schema:
    requests = {"infer": infer_request(config), "generate": generate_request(config)}
    return {f"{config.name}_{what}": schema for what, schema in requests.items()} | {
        f"{config.name}_generated": generate_result(config)
    }


def paths_of(config: ModelConfig) -> Schema:
    path, name = f"/v2/models/{config.name}", config.name
    generated = ref(f"{name}_generated")
    events = {"text/event-stream": {"schema": TEXT, "x-event-schemas": {"message": generated}}}
    return {
        f"{path}/infer": _post(
            name, "infer", "infer", {"200": json_answer("The outputs", ref("OipInferResult")), **_OF_MODEL}
        ),
        f"{path}/generate": _post(
            name, "generate", "generate", {"200": json_answer("The one response", generated), **_OF_GENERATION}
        ),
        f"{path}/generate_stream": _post(
            name, "generate_stream", "generate", {"200": answer("The responses", events), **_OF_STREAM}
        ),
    }


def _post(name: str, verb: str, request: str, answers: Schema) -> Schema:
    summary = f"{verb} with model {name}"
    described = operation(f"oip_{verb}_{name}", name, summary, _DESCRIPTIONS[verb], answers, TIMEOUT_HEADER)
    content = {"application/json": {"schema": ref(f"{name}_{request}")}}
    return {"post": described | {"requestBody": {"required": True, "content": content}}}


TAG = "models"
_OF_PROTOCOL = "As the Open Inference Protocol and Triton's extensions describe it."
_UNKNOWN = (errors.UnknownModel, errors.InvalidInput)
_OPTIONAL_READY: Schema = {"type": "object", "properties": {"ready": {"type": "boolean"}}}


def _get(operation_id: str, summary: str, schema: str, *possible: type[errors.GatewayError]) -> Schema:
    answers = {"200": json_answer(summary, ref(schema)), **error_answers(*possible)}
    return {"get": operation(operation_id, TAG, summary, _OF_PROTOCOL, answers)}


def _health(operation_id: str, summary: str, *possible: type[errors.GatewayError]) -> Schema:
    answers = {"200": answer(summary), **error_answers(*possible)}
    return {"get": operation(operation_id, TAG, summary, f"{_OF_PROTOCOL} The answer has no body.", answers)}


def _index() -> Schema:
    answers = {"200": json_answer("The models", ref("OipIndex")), **error_answers(errors.PayloadTooLarge)}
    body = {"required": False, "content": {"application/json": {"schema": _OPTIONAL_READY}}}
    return {"post": operation("oip_index", TAG, "The models under /v2", _OF_PROTOCOL, answers) | {"requestBody": body}}


def document_paths(models: Sequence[str]) -> Schema:
    """``models``: the exposed models. Each path also exists under ``/versions/{version}``."""
    model: Schema = {"name": "model", "in": "path", "required": True, "schema": enum_of(models)}
    documents = {
        "": ("metadata", "Its versions, inputs and outputs", "OipModel"),
        "/config": ("config", "Its configuration", "OipConfig"),
        "/stats": ("stats", "Its statistics", "OipStatistics"),
    }
    paths: Schema = {"/v2/models/{model}/ready": _health("oip_model_ready", "Whether it is ready", *_UNKNOWN)}
    for path, (name, summary, schema) in documents.items():
        paths[f"/v2/models/{{model}}{path}"] = _get(f"oip_{name}", summary, schema, *_UNKNOWN)
    return (
        {path: {"get": described["get"] | {"parameters": [model]}} for path, described in paths.items()}
        if models
        else {}
    )


HEALTH_PATHS: Schema = {
    "/v2/health/live": _health("oip_live", "Whether the gateway answers"),
    "/v2/health/ready": _health("oip_ready", "Whether models can be called"),
}
SERVER_PATHS: Schema = {
    "/v2": _get("oip_server", "The server and its extensions", "OipServer"),
    "/v2/repository/index": _index(),
    "/v2/models/stats": _get("oip_all_statistics", "The statistics of all models", "OipStatistics"),
}


def described(catalog: Catalog, key: Key | None) -> Described:
    names = [name for name in catalog.oip_models.names if allows_model(key, catalog, name)]
    paths, schemas = SERVER_PATHS | HEALTH_PATHS | document_paths(names), dict(SCHEMAS)
    for config in (each for each in catalog.oip_models.configs if each.name in names):
        paths |= paths_of(config)
        schemas |= schemas_of(config)
    tags = {TAG: "The Open Inference Protocol"} | {name: f"Model {name}" for name in names}
    return Described(paths, schemas, REFUSALS, RESPONSES, keyless_paths=list(HEALTH_PATHS), tags=tags)
