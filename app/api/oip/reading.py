"""Reads a request's body, inflates it if it is compressed, and finds the length of its JSON."""

from app.api.bodies import off_loop, receive_body
from app.api.exchange import Exchange
from app.api.inflating import inflated
from app.api.limits import Limits
from app.api.oip.infer_request import Asked, asked_of, asked_of_raw
from app.api.oip.signature import Signature
from app.domain.errors import InvalidInput, UnsupportedMediaType
from app.pipelines.body import LARGE_BYTES

_ENCODINGS = {"gzip", "deflate"}
_LENGTH = b"inference-header-content-length"
_MAX_DIGITS = 18


async def read_asked(exchange: Exchange, signature: Signature, version: str, limits: Limits) -> Asked:
    """Raises the client errors of ``app.domain.errors``."""
    body = await read_content(exchange, limits, tensor_at=_declared(exchange))
    json_bytes = _json_bytes_of(exchange, len(body))
    if json_bytes == 0:
        return asked_of_raw(body, signature, version)
    if json_bytes < LARGE_BYTES and not signature.takes_bytes:
        return asked_of(body, json_bytes, signature, version)
    asked = await off_loop(lambda body: asked_of(body, json_bytes, signature, version), body)
    if json_bytes == len(body):
        exchange.forget_body()  # the tensors were copied, and the answer needs memory too
    return asked


async def read_content(exchange: Exchange, limits: Limits, *, tensor_at: int | None = None) -> memoryview:
    """Returns the inflated body. Raises UnsupportedMediaType, InvalidRequest, and the errors of ``receive_body``.

    ``tensor_at``: as for ``receive_body``, for a body that is not compressed.
    """
    encoding = (exchange.header(b"content-encoding") or "identity").strip().lower()
    if encoding in {"identity", ""}:
        return await receive_body(exchange, limits, tensor_at=tensor_at)
    if encoding not in _ENCODINGS:
        raise UnsupportedMediaType("Unsupported compression type.", hint="Content-Encoding may be gzip or deflate.")
    return await inflated(exchange, await receive_body(exchange, limits), limits)


def _json_bytes_of(exchange: Exchange, size: int) -> int:
    """The length of the JSON in bytes; 0 if the body is raw data for the model's only input. Raises InvalidInput."""
    if exchange.header(_LENGTH) is None:
        return size or 1  # an empty body is not JSON
    declared = _declared(exchange)
    if declared is None or declared > size:
        raise InvalidInput(f"inference header size should be in range (0, {size}).")
    return declared


def _declared(exchange: Exchange) -> int | None:
    """``Inference-Header-Content-Length``; None if it is missing or not a valid length."""
    text = exchange.header(_LENGTH) or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None
