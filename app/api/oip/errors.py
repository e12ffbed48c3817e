"""Errors in the form and with the statuses of the Open Inference Protocol over HTTP, as Triton answers them."""

from starlette.responses import Response

from app.api.error_table import ROW_BY_ERROR
from app.api.responses import JsonResponse
from app.domain.errors import ContractViolation, GatewayError, InvalidInput, ModelError, UpstreamProtocol

MAX_TEXT = 512

_STATUS_BY_CODE = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501}
"""Code of a model's own error -> Triton's status. All other codes are 400, so an early exit is 400 too."""


def status_of(error: GatewayError) -> int:
    """Triton's status for an error of the model; for the gateway's own errors theirs, a client's mistake being 400."""
    is_of_model = isinstance(error, ModelError | ContractViolation) and not isinstance(error, UpstreamProtocol)
    if is_of_model and error.upstream is not None:
        return _STATUS_BY_CODE.get(error.upstream.grpc_code or "", 400)
    return 400 if isinstance(error, InvalidInput) else ROW_BY_ERROR[type(error)].status


def message_of(error: GatewayError) -> str:
    """What the caller is told, at most MAX_TEXT characters."""
    text = error.detail if error.hint is None else f"{error.detail} {error.hint}"
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_TEXT])


def error_response(error: GatewayError, _request_id: str) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JsonResponse({"error": message_of(error)}, status_of(error), headers)
