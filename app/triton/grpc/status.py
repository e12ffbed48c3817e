"""Reads the status of a gRPC call. Source: gRPC over HTTP/2 (PROTOCOL-HTTP2.md) and http-grpc-status-mapping.md."""

from urllib.parse import unquote_to_bytes

from app.domain.grpc_status import CODES
from app.triton.grpc.events import Headers
from app.triton.transport import BrokenExchange, RpcError

_CODE_BY_HTTP_STATUS = {
    b"400": "INTERNAL",
    b"401": "UNAUTHENTICATED",
    b"403": "PERMISSION_DENIED",
    b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE",
    b"502": "UNAVAILABLE",
    b"503": "UNAVAILABLE",
    b"504": "UNAVAILABLE",
}
_CODE_BY_RESET = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
_REFUSED_STREAM = 7


def error_of_trailers(trailers: Headers) -> RpcError | None:
    """Returns the error in the trailers, or None for the status OK."""
    fields = dict(trailers)
    number = fields.get(b"grpc-status")
    if number == b"0":
        return None
    if number is None:
        return _error_of_http(fields.get(b":status", b""))
    code = CODES[int(number)] if number.isdigit() and len(number) < 3 and int(number) < len(CODES) else "UNKNOWN"
    text = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return RpcError(code, text, is_answer=True)


def error_of_head(headers: Headers) -> RpcError | None:
    """Returns an error if the response is not from a gRPC server but from a proxy. Ignores interim responses."""
    if (b":status", b"200") in headers:
        return None
    status = dict(headers).get(b":status", b"")
    return None if status.startswith(b"1") else _error_of_http(status)


def error_of_reset(code: int, reason: str) -> RpcError:
    """Returns the error of a stream that ended with RST_STREAM. ``reason``: empty if the server sent it."""
    details = reason or f"the server reset the stream with HTTP/2 error {code}"
    return RpcError(_CODE_BY_RESET.get(code, "INTERNAL"), details, was_sent=code != _REFUSED_STREAM)


def _error_of_http(status: bytes) -> RpcError:
    if status in (b"", b"200"):
        return BrokenExchange("the response has no gRPC status")
    return RpcError(
        _CODE_BY_HTTP_STATUS.get(status, "UNKNOWN"), f"the server answered with HTTP status {status.decode('latin-1')}"
    )
