"""Errors of ``/v2`` by status."""

from app.api.error_table import ROW_BY_ERROR
from app.api.oip.errors import status_of_kind
from app.api.openapi.answers import ANYWHERE, REFUSED, headers_of_errors, json_answer
from app.domain import errors
from app.domain.errors import GatewayError
from app.domain.json_schema import Schema

MODEL_STATUSES = (400, 404, 500, 501, 503)
"""Statuses of errors of a model."""


def ref(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}


def error_answers(*possible: type[GatewayError], of_model: bool = False) -> Schema:
    kinds = (*possible, *ANYWHERE, errors.UpstreamUnavailable, errors.DeadlineExceeded)
    statuses = {*map(status_of_kind, kinds), *(MODEL_STATUSES if of_model else ())}
    return {str(status): {"$ref": "#/components/responses/OipError"} for status in sorted(statuses)}


def stream_error_answers(*possible: type[GatewayError]) -> Schema:
    """Errors of the model before the first response are events."""
    return error_answers(*possible) | {"400": {"$ref": "#/components/responses/OipStreamError"}}


_ERROR = json_answer("An error. With 429 and 503 `Retry-After` may say when to retry.", ref("OipError"))
_EVENT: Schema = {"text/event-stream": {"schema": {"type": "string"}, "x-event-schemas": {"message": ref("OipError")}}}

REFUSALS: Schema = {
    str(status_of_kind(error)): json_answer(ROW_BY_ERROR[error].meaning, ref("OipError"), *headers_of_errors([error]))
    for error in REFUSED
}
RESPONSES: Schema = {
    "OipError": _ERROR,
    "OipStreamError": _ERROR | {"content": _ERROR["content"] | _EVENT},
}
