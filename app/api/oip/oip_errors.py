"""Errors in the form and with the statuses of the Open Inference Protocol over HTTP, as Triton answers them."""

from starlette.responses import Response

from app.api.error_table import ROW_BY_ERROR, headers_of
from app.api.responses import JsonResponse
from app.core.errors import ContractViolation, GatewayError, InvalidInput, ModelError, UpstreamProtocol
from app.core.text import shown

MAX_TEXT = 512

_STATUS_BY_CODE = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501}
"""gRPC code of a model's error -> Triton's HTTP status. All other codes become 400, including early exits."""


def status_of(error: GatewayError) -> int:
    """Returns Triton's status for an error of the model, and the gateway's status for others; client errors are 400."""
    if error.upstream is not None and is_of_model(error):
        return _STATUS_BY_CODE.get(error.upstream.grpc_code or "", 400)
    return status_of_kind(type(error))


def status_of_kind(kind: type[GatewayError]) -> int:
    """The status of an error that is not an error of the model."""
    return 400 if kind is InvalidInput else ROW_BY_ERROR[kind].status


def is_of_model(error: GatewayError) -> bool:
    """Whether Triton reported that the model failed or rejected its input."""
    is_failure = isinstance(error, ModelError | ContractViolation) and not isinstance(error, UpstreamProtocol)
    return is_failure and error.upstream is not None


def message_of(error: GatewayError) -> str:
    """The message for the caller, at most MAX_TEXT characters."""
    text = error.detail if error.hint is None else f"{error.detail} {error.hint}"
    return shown(text, MAX_TEXT)


def error_response(error: GatewayError, _request_id: str) -> Response:
    return JsonResponse({"error": message_of(error)}, status_of(error), headers_of(error))
