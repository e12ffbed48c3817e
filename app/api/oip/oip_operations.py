"""Describes ``/v2``, with the request schemas of each model.

Each operation of a model also exists under ``/versions/{version}``, which the document does not repeat.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from app.api import openapi
from app.api.error_table import lenient_status_of
from app.api.oip.oip_bodies import MAX_ID
from app.api.oip.signature import MAX_NAME, MAX_PARAMETERS, MAX_TEXT
from app.codecs.kinds import RANGE_BY_DATATYPE
from app.core import errors
from app.core.errors import GatewayError
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, INTEGER_DATATYPES
from app.core.json import COUNT, TEXT, Schema, const_of, enum_of, list_of, object_of, one_of
from app.core.model import ModelConfig

_ERROR = openapi.named("OipError", {"error": TEXT})
_SERVER = openapi.named("OipServer", {"name": TEXT, "version": TEXT, "extensions": list_of(TEXT)})
_STATE = enum_of(["READY", "UNAVAILABLE"])
_INDEX = openapi.Named("OipIndex", lambda: list_of(object_of({"name": TEXT, "version": TEXT, "state": _STATE})))
_TENSOR = object_of({"name": TEXT, "datatype": TEXT, "shape": list_of({"type": "integer", "minimum": -1})})
_TENSORS = {"inputs": list_of(_TENSOR), "outputs": list_of(_TENSOR)}
_MODEL = openapi.named("OipModel", {"name": TEXT, "versions": list_of(TEXT), "platform": TEXT, **_TENSORS})
_CONFIG = openapi.named(
    "OipConfig", {"name": TEXT, "max_batch_size": COUNT, "input": list_of({}), "output": list_of({})}
)
_STATISTICS = openapi.named("OipStatistics", {"model_stats": list_of(object_of({"name": TEXT, "version": TEXT}))})
_VALUE: Schema = {"type": ["boolean", "number", "string", "null"]}
_OUTPUT = object_of(
    {
        "name": TEXT,
        "datatype": enum_of(DTYPE_BY_DATATYPE),
        "shape": list_of(COUNT),
        "data": list_of(_VALUE),
        "parameters": object_of({"binary_data_size": COUNT}),
    },
    *("data", "parameters"),
)
_EXITED: Schema = {"parameters": object_of({"early_exit": TEXT})}
_RESULT = {"id": TEXT, "model_name": TEXT, "model_version": TEXT, "outputs": list_of(_OUTPUT)} | _EXITED
_INFERRED = openapi.named("OipInferResult", _RESULT, "id", *_EXITED)
ERRORS = openapi.ErrorAnswers("OipError", {"application/json": {"schema": _ERROR}}, lenient_status_of, has_codes=False)
_MODEL_STATUSES = (400, 404, 500, 501, 503)
"""The statuses of errors of a model."""
_EVENT: Schema = {"text/event-stream": {"schema": TEXT, "x-event-schemas": {"message": _ERROR}}}
_STREAM_ERRORS = openapi.ErrorAnswers("OipStreamError", ERRORS.content | _EVENT, lenient_status_of, has_codes=False)
_OF_PROTOCOL = "As the Open Inference Protocol and Triton's extensions describe it."
_POSSIBLE = (*openapi.INFERENCE_ERRORS, errors.UnknownModel)
_DOWN = (errors.UpstreamUnavailable, errors.DeadlineExceeded)
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


def tags_of(visible: openapi.Visible) -> Mapping[str, str]:
    return {"models": "The Open Inference Protocol"} | {each.name: f"Model {each.name}" for each in visible.models}


def infer_request(config: ModelConfig) -> Schema:
    """OpenAPI cannot describe the binary tensors after the JSON."""
    inputs: list[Schema] = []
    for spec in config.inputs:
        batch = [{"type": "integer", "minimum": 1, "maximum": config.max_batch_size}] if config.max_batch_size else []
        dims = [*batch, *({**COUNT, "maximum": 2**63 - 1} if dim == -1 else const_of(dim) for dim in spec.dims)]
        shape = {**list_of({"type": "integer"}), "prefixItems": dims, "minItems": len(dims), "maxItems": len(dims)}
        tensor = {"name": const_of(spec.name), "datatype": const_of(spec.datatype), "shape": shape}
        inputs.append(object_of({**tensor, "data": list_of(_element(spec.datatype))}))
    outputs = object_of({"name": enum_of(spec.name for spec in config.outputs)})
    listed: Schema = {"type": "array", "items": one_of(inputs) if inputs else {}}
    required = [spec for spec in config.inputs if not spec.optional]
    listed |= {"minItems": len(required), "maxItems": len(inputs)}
    if required:
        listed["allOf"] = [{"contains": object_of({"name": const_of(spec.name)})} for spec in required]
    return object_of(
        {"id": {**TEXT, "maxLength": MAX_ID}, "inputs": listed, "outputs": list_of(outputs)}, "id", "outputs"
    )


def _element(datatype: str) -> Schema:
    if datatype in {BYTES, "BOOL", "FP64"}:
        return {"type": {BYTES: "string", "BOOL": "boolean"}.get(datatype, "number")}
    low, high = RANGE_BY_DATATYPE[datatype]
    return {"type": "integer" if datatype in INTEGER_DATATYPES else "number", "minimum": low, "maximum": high}


def generate_request(config: ModelConfig) -> Schema:
    """Members that are not inputs are request parameters.

    Not ``additionalProperties``: orval makes an index signature of it, which the inputs do not fit.
    """
    fields = {spec.name: _one_or_list(_element(spec.datatype)) for spec in config.inputs}
    optional = [spec.name for spec in config.inputs if spec.optional]
    members = {**fields, "id": {**TEXT, "maxLength": MAX_ID}, "parameters": {"type": "object", **_PARAMETERS}}
    schema = object_of(members, *optional, "id", "parameters") | _PARAMETERS
    names = "|".join(re.sub(r"[\\^$.*+?()\[\]{}|]", r"\\\g<0>", name) for name in members)
    return schema | {"patternProperties": {f"^(?!({names})$)": schema.pop("additionalProperties")}}


def _generated(config: ModelConfig) -> Schema:
    fields = {spec.name: _one_or_list(_VALUE) for spec in config.outputs}
    known = {**fields, "id": TEXT, "early_exit": TEXT, "model_name": TEXT, "model_version": TEXT}
    return object_of(known, *fields, "id", "early_exit")


def _one_or_list(element: Schema) -> Schema:
    return {"anyOf": [element, list_of(element)]}


def _inference(config: ModelConfig, verb: str, answers: Mapping[int, Any], body: openapi.Named) -> openapi.Operation:
    return openapi.Operation(
        f"oip_{verb}_{config.name}",
        config.name,
        answers,
        (*_POSSIBLE, *_DOWN),
        [openapi.TIMEOUT_HEADER],
        {"application/json": {"schema": body}},
        path=config.name,
        summary=f"{verb} with model {config.name}",
    )


def infer(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    failed = {status: openapi.ErrorAnswer(ERRORS, status, [errors.ModelError]) for status in _MODEL_STATUSES}
    for each in visible.models:
        body = openapi.Named(f"{each.name}_infer", partial(infer_request, each))
        yield _inference(each, "infer", failed | {200: openapi.json_answer("The outputs", _INFERRED)}, body)


def generate(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    for each in visible.models:
        yield _inference(
            each, "generate", {200: openapi.json_answer("The one response", _result(each))}, _request(each)
        )


def stream(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    for each in visible.models:
        events = {"text/event-stream": {"schema": TEXT, "x-event-schemas": {"message": _result(each)}}}
        failed = _STREAM_ERRORS.of((*_POSSIBLE, errors.InvalidRequest))[400]
        yield _inference(
            each, "generate_stream", {200: openapi.answer("The responses", events), 400: failed}, _request(each)
        )


def _request(config: ModelConfig) -> openapi.Named:
    return openapi.Named(f"{config.name}_generate", partial(generate_request, config))


def _result(config: ModelConfig) -> openapi.Named:
    return openapi.Named(f"{config.name}_generated", partial(_generated, config))


def _get(
    name: str, text: str, schema: openapi.Named | None = None, errors: Sequence[type[GatewayError]] = _DOWN
) -> openapi.Operation:
    ok = openapi.answer(text) if schema is None else openapi.json_answer(text, schema)
    return openapi.Operation(f"oip_{name}", "models", {200: ok}, errors, summary=text, description=_OF_PROTOCOL)


def _of_model(name: str, text: str, schema: openapi.Named | None = None) -> openapi.Operations:
    """The names of the models are those of a parameter."""
    described = _get(name, text, schema, (errors.UnknownModel, errors.InvalidInput, *_DOWN))

    def operations(visible: openapi.Visible) -> Iterator[openapi.Operation]:
        if visible.models:
            names = enum_of(each.name for each in visible.models)
            yield replace(described, parameters=[openapi.in_path("model", names)])

    return operations


LIVE = _get("live", "Whether the gateway answers")
READY = _get("ready", "Whether models can be called")
SERVER = _get("server", "The server and its extensions", _SERVER)
ALL_STATISTICS = _get("all_statistics", "The statistics of all models", _STATISTICS)
INDEX = replace(
    _get("index", "The models under /v2", _INDEX, (errors.PayloadTooLarge, *_DOWN)),
    body={"application/json": {"schema": {"type": "object", "properties": {"ready": {"type": "boolean"}}}}},
    needs_body=False,
)
MODEL_READY = _of_model("model_ready", "Whether it is ready")
METADATA = _of_model("metadata", "Its versions, inputs and outputs", _MODEL)
CONFIG = _of_model("config", "Its configuration", _CONFIG)
STATISTICS = _of_model("stats", "Its statistics", _STATISTICS)
