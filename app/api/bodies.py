"""Receives request bodies within the limits of size and time, and decodes large bodies in a thread.

Inflates bodies with a Content-Encoding in pieces, up to the limit of a body.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from email.message import Message
from functools import lru_cache, partial
from mmap import mmap
from typing import TypeVar

from app.api.body_thread import BodyThread
from app.api.exchange import CancelledOnDisconnect, Exchange
from app.api.limits import Limits
from app.core.errors import ClientClosedRequest, InvalidRequest, PayloadTooLarge, SlowRequest, UnsupportedMediaType
from app.core.inference import Deadline
from app.pipelines.body import LARGE_BYTES
from app.pipelines.pipeline import Pipeline

JSON_HINT = "With curl, add: -H 'Content-Type: application/json'"
MAX_QUERY_FIELDS = 128
Read = TypeVar("Read")

LONG_BYTES = 1024 * 1024
"""Shorter bodies do not wait for all longer ones of their caller."""
_thread = BodyThread()


async def read_json(exchange: Exchange, limits: Limits) -> memoryview:
    """Reads a body that must be JSON. Raises UnsupportedMediaType, and the errors of ``read_body``."""
    if not is_json(media_type_of(exchange.header(b"content-type") or "")):
        raise UnsupportedMediaType("The content type is not application/json.", hint=JSON_HINT)
    check_no_query(exchange)
    return await read_body(exchange, limits)


async def read_json_of_any(exchange: Exchange, limits: Limits, pipelines: Iterable[Pipeline]) -> memoryview:
    """Reads a JSON body that names one of the pipelines. Raises the errors of ``read_json``.

    Call ``check_size`` when the pipeline is known. ``pipelines`` is not iterated for a body within ``limits``.
    """
    size = _declared_size(exchange)
    if size is None or size > limits.max_body_bytes:
        limits = max([limits, *map(limits.of, pipelines)], key=lambda each: each.max_body_bytes)
    return await read_json(exchange, limits)


def check_size(size: int, limits: Limits) -> None:
    """Raises PayloadTooLarge."""
    if size > limits.max_body_bytes:
        raise _too_large(limits, f"The body has {size} bytes, more")


async def read_body(
    exchange: Exchange, limits: Limits, *, tensor_at: int | None = None, decodes: bool = False
) -> memoryview:
    """Receives the body unchanged.

    ``tensor_at``: where in the body the first tensor begins, as for TensorMemory; None: nowhere. ``decodes``: whether
    the caller decodes the Content-Encoding.

    Raises UnsupportedMediaType, PayloadTooLarge, TooManyRequests, SlowRequest or ClientClosedRequest.
    """
    encoding = exchange.header(b"content-encoding")
    if encoding is not None and not decodes and encoding.strip().lower() not in {"identity", ""}:
        raise UnsupportedMediaType(
            "The gateway does not decode a Content-Encoding.", hint="Send the body uncompressed, without that header."
        )
    body = exchange.connection.take_body(min(LARGE_BYTES, limits.max_body_bytes))
    if body is not None:
        exchange.hold(len(body))
        return memoryview(body)
    size = _declared_size(exchange)
    if size is not None:
        check_size(size, limits)
    content = exchange.tensor_memory(size, tensor_at) if tensor_at is not None and size is not None else None
    return await _Growing(exchange, limits, content).received()


def _declared_size(exchange: Exchange) -> int | None:
    length = exchange.header(b"content-length") or ""
    return int(length[:20]) if length.isdecimal() else None


async def off_loop(
    read: Callable[[memoryview], Read],
    body: memoryview,
    exchange: Exchange,
    deadline: Deadline | None = None,
    *,
    is_slow: bool = False,
) -> Read:
    """Returns ``read(body)``. A large body is read in a thread, so that other requests do not wait for it.

    ``is_slow``: reading takes long for a small body too. Raises the errors of ``read``; for a body that is read in a
    thread also DeadlineExceeded, and ClientClosedRequest.
    """
    if len(body) < LARGE_BYTES and not is_slow:
        return read(body)
    is_message = exchange.task is not asyncio.current_task()  # of a WebSocket, whose end cancels its messages
    with nullcontext() if is_message else CancelledOnDisconnect(exchange):
        is_long = is_slow or len(body) >= LONG_BYTES
        return await _thread.read(partial(read, body), exchange.caller, deadline, is_long=is_long)


def check_no_query(exchange: Exchange) -> None:
    """Rejects a query string, because the body has all fields of the request. Raises InvalidRequest."""
    if exchange.scope["query_string"]:
        raise InvalidRequest(
            "The query string is not allowed with a JSON body or a form.",
            hint="Send every input and parameter in the body.",
        )


def check_query(exchange: Exchange) -> None:
    """Rejects a query with too many fields before anything parses it. Raises InvalidRequest."""
    if exchange.scope["query_string"].count(b"&") >= MAX_QUERY_FIELDS:
        raise InvalidRequest(f"The query string has more than {MAX_QUERY_FIELDS} fields.")


class _Growing:
    """A body that is being received.

    A large body has its own mapping, which uses memory only for received bytes and is freed as a whole. On the
    heap, bodies that grow at the same time leave gaps, which the process never returns.

    ``content``: memory reserved for this body, or None.
    """

    def __init__(self, exchange: Exchange, limits: Limits, content: memoryview | None) -> None:
        self._exchange = exchange
        self._limits = limits
        self._content: bytearray | mmap | memoryview = bytearray() if content is None else content
        self._size = 0

    async def received(self) -> memoryview:
        """Waits for the whole body. Raises PayloadTooLarge, TooManyRequests, SlowRequest or ClientClosedRequest."""
        try:
            async with asyncio.timeout(self._limits.body_s):
                is_complete = await self._exchange.connection.receive_body(self)
        except TimeoutError as exc:
            raise SlowRequest(f"The body did not arrive within {self._limits.body_s:g} s.") from exc
        if not is_complete:
            raise ClientClosedRequest("The client disconnected while it was sending the body.")
        return memoryview(self._content)[: self._size]

    def add(self, part: bytes) -> None:
        """Raises PayloadTooLarge or TooManyRequests."""
        start, size = self._size, self._size + len(part)
        if size >= LARGE_BYTES:
            self._map()
        self.filled(len(part))
        self._content[start:size] = part

    def room(self, size: int) -> memoryview:
        """Returns memory for the next ``size`` bytes. The body's length must be within the limit."""
        return memoryview(self._map())[self._size : self._size + size]

    def filled(self, size: int) -> None:
        """Raises PayloadTooLarge or TooManyRequests."""
        self._size += size
        if self._size > self._limits.max_body_bytes:
            raise _too_large(self._limits)
        self._exchange.hold(size)

    def _map(self) -> mmap | memoryview:
        if isinstance(self._content, bytearray):
            begun, self._content = self._content, self._exchange.memory(self._limits.max_body_bytes)
            self._content[: len(begun)] = begun
        return self._content


def _too_large(limits: Limits, more: str = "The body has more") -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{more} than the limit of {limits.max_body_bytes} bytes.", hint=f"An operator can raise {limits.body_key}."
    )


@lru_cache(256)
def media_type_of(content_type: str) -> str:
    """``type/subtype`` in lower case; empty without the header."""
    header = Message()
    header["content-type"] = content_type
    return header.get_content_type() if content_type else ""


@lru_cache(256)
def is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


READ_BYTES = 64 * 1024
"""Compressed bytes that are read at once. A larger body is inflated in a thread."""
PIECE_BYTES = 128 * 1024
"""Size of one piece. The pieces after the first one are inflated in a thread."""
MAX_SILENT_BYTES = 2 * READ_BYTES
"""Limit of compressed bytes without content: more than the longest header of a block or of gzip's extra field."""
_ANY_HEADER = zlib.MAX_WBITS | 32
"""Accepts gzip (RFC 1952) and zlib, which HTTP calls deflate (RFC 1950)."""


async def inflated(exchange: Exchange, body: memoryview, limits: Limits) -> memoryview:
    """Inflates one gzip or deflate stream. Raises InvalidRequest, PayloadTooLarge or TooManyRequests."""
    pieces, content = _pieces_of(body), bytearray()
    piece = next(pieces, b"") if len(body) <= READ_BYTES else await asyncio.to_thread(next, pieces, b"")
    while piece:
        exchange.hold(len(piece))
        content += piece
        if len(content) > limits.max_body_bytes:
            raise _too_large(limits, "The inflated body has more")
        piece = await asyncio.to_thread(next, pieces, b"")
    return memoryview(content)


def _pieces_of(body: memoryview) -> Iterator[bytes]:
    """Raises InvalidRequest."""
    decompress = zlib.decompressobj(_ANY_HEADER)
    silent_bytes = 0
    try:
        for start in range(0, len(body), READ_BYTES):
            rest: bytes | memoryview = body[start : start + READ_BYTES]
            silent_bytes += len(rest)
            while piece := decompress.decompress(rest, PIECE_BYTES):
                silent_bytes = 0
                yield piece
                rest = decompress.unconsumed_tail
            if silent_bytes > MAX_SILENT_BYTES:
                raise _malformed()
            if decompress.eof and (decompress.unused_data or start + READ_BYTES < len(body)):
                raise _malformed()
    except zlib.error as exc:
        raise _malformed() from exc
    if not decompress.eof:
        raise _malformed()


def _malformed() -> InvalidRequest:
    return InvalidRequest("The body does not match its Content-Encoding.")
