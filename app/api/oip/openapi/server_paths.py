"""The read-only operations for the server and for its models."""

from collections.abc import Sequence

from app.api.oip.openapi.answers import error_answers, ref
from app.api.openapi.answers import answer, json_answer, operation
from app.domain import errors
from app.domain.json_schema import Schema, enum_of

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
