"""The bytes of a request's body, inflated if they came compressed, and how many of them are JSON."""

from app.api.bodies import off_loop, receive_body
from app.api.exchange import Exchange
from app.api.inflating import inflated
from app.api.limits import Limits
from app.api.oip.infer_request import Asked, asked_of, asked_of_raw
from app.api.oip.signature import Signature
from app.domain.errors import InvalidInput, UnsupportedMediaType
from app.pipelines.body import LARGE_BYTES

_ENCODINGS = {"gzip", "deflate"}
_MAX_DIGITS = 18


async def read_asked(exchange: Exchange, signature: Signature, version: str, limits: Limits) -> Asked:
    """Raises the client errors of ``app.domain.errors``."""
    body = await read_content(exchange, limits, tensor_at=_tensor_at(exchange))
    json_bytes = _json_bytes_of(exchange, len(body))
    if json_bytes == 0:
        return asked_of_raw(body, signature, version)
    if json_bytes < LARGE_BYTES and not signature.takes_bytes:
        return asked_of(body, json_bytes, signature, version)
    asked = await off_loop(lambda body: asked_of(body, json_bytes, signature, version), body)
    if json_bytes == len(body):
        exchange.forget_body()  # the tensors have memory of their own, and the answer needs some too
    return asked


async def read_content(exchange: Exchange, limits: Limits, *, tensor_at: int | None = None) -> memoryview:
    """The body, inflated. Raises UnsupportedMediaType, InvalidRequest, and as ``receive_body``.

    ``tensor_at``: as for ``receive_body``, in a body that is not compressed.
    """
    encoding = (exchange.header(b"content-encoding") or "identity").strip().lower()
    if encoding in {"identity", ""}:
        return await receive_body(exchange, limits, tensor_at=tensor_at)
    if encoding not in _ENCODINGS:
        raise UnsupportedMediaType("Unsupported compression type.", hint="Content-Encoding may be gzip or deflate.")
    return await inflated(exchange, await receive_body(exchange, limits), limits)


def _tensor_at(exchange: Exchange) -> int | None:
    """Where the binary tensors begin; None without any."""
    text = exchange.header(b"inference-header-content-length") or ""
    return int(text[:_MAX_DIGITS]) if text.isascii() and text.isdecimal() else None


def _json_bytes_of(exchange: Exchange, size: int) -> int:
    """``Inference-Header-Content-Length``; 0: the body is the model's one input. Raises InvalidInput."""
    text = exchange.header(b"inference-header-content-length")
    if text is None:
        return size or 1  # an empty body is not JSON
    if not (text.isascii() and text.isdecimal() and int(text[:_MAX_DIGITS]) <= size):
        raise InvalidInput(f"inference header size should be in range (0, {size}).")
    return int(text)
