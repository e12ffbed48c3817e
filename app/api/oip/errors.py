"""Errors in the form and with the statuses of the Open Inference Protocol over HTTP, as Triton answers them."""

from starlette.responses import Response

from app.api.error_table import ROW_BY_ERROR, headers_of
from app.api.responses import JsonResponse
from app.domain.errors import ContractViolation, GatewayError, InvalidInput, ModelError, UpstreamProtocol

MAX_TEXT = 512

_STATUS_BY_CODE = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501}
"""Code of a model's own error -> Triton's status. All other codes are 400, so an early exit is 400 too."""


def status_of(error: GatewayError) -> int:
    """Triton's status for an error of the model; for the gateway's own errors theirs, a client's mistake being 400."""
    if error.upstream is not None and is_of_model(error):
        return _STATUS_BY_CODE.get(error.upstream.grpc_code or "", 400)
    return status_of_kind(type(error))


def status_of_kind(kind: type[GatewayError]) -> int:
    """Of an error that is not the model's own."""
    return 400 if kind is InvalidInput else ROW_BY_ERROR[kind].status


def is_of_model(error: GatewayError) -> bool:
    """Whether the model failed, or refused its input, and Triton says so."""
    is_failure = isinstance(error, ModelError | ContractViolation) and not isinstance(error, UpstreamProtocol)
    return is_failure and error.upstream is not None


def message_of(error: GatewayError) -> str:
    """What the caller is told, at most MAX_TEXT characters."""
    text = error.detail if error.hint is None else f"{error.detail} {error.hint}"
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_TEXT])


def error_response(error: GatewayError, _request_id: str) -> Response:
    return JsonResponse({"error": message_of(error)}, status_of(error), headers_of(error))
