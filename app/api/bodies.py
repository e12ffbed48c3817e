"""Receives request bodies within the limits of size and time; inflates and decodes large ones in a thread; forms."""

import asyncio
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from mmap import mmap
from typing import TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from app.admission.keys import Key
from app.admission.queue import FairQueue
from app.api.exchange import Exchange
from app.core import errors
from app.core.inference import Deadline
from app.pipelines.body import LARGE_BYTES, FilePart
from app.pipelines.pipeline import Pipeline, Target

JSON_HINT = "With curl, add: -H 'Content-Type: application/json'"
MAX_QUERY_FIELDS = 128
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    max_bytes_in_flight: int = 256 * 1024 * 1024
    """Limit for the bodies of all requests together."""
    max_connections: int = 4096
    body_s: float = 30.0
    """Time limit for the whole body to arrive."""
    ping_s: float = 15.0
    send_s: float = 10.0
    """Time limit for a client to make progress with reading."""
    body_key: str = "GATEWAY_MAX_BODY_BYTES"
    """The setting or key that sets ``max_body_bytes``."""

    def of(self, pipeline: Target) -> "Limits":
        """The limits of requests to a pipeline, which may have its own limit of a body."""
        own = None if pipeline.spec.limits is None else pipeline.spec.limits.body_bytes
        if own is None:
            return self
        most, is_own = self.max_bytes_in_flight, own <= self.max_bytes_in_flight
        key = "`limits.body_bytes` of the pipeline" if is_own else "GATEWAY_MAX_BYTES_IN_FLIGHT"
        return replace(self, max_body_bytes=min(own, most), body_key=key)


async def read_json(exchange: Exchange, limits: Limits) -> memoryview:
    """Reads a body that must be JSON. Raises UnsupportedMediaType, and the errors of ``read_body``."""
    if not is_json(media_type_of(exchange.header(b"content-type") or "")):
        raise errors.UnsupportedMediaType("The content type is not application/json.", hint=JSON_HINT)
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
        raise errors.UnsupportedMediaType(
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


def check_no_query(exchange: Exchange) -> None:
    """Rejects a query string, because the body has all fields of the request. Raises InvalidRequest."""
    if exchange.scope["query_string"]:
        raise errors.InvalidRequest(
            "The query string is not allowed with a JSON body or a form.",
            hint="Send every input and parameter in the body.",
        )


def check_query(exchange: Exchange) -> None:
    """Rejects a query with too many fields before anything parses it. Raises InvalidRequest."""
    if exchange.scope["query_string"].count(b"&") >= MAX_QUERY_FIELDS:
        raise errors.InvalidRequest(f"The query string has more than {MAX_QUERY_FIELDS} fields.")


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
            raise errors.SlowRequest(f"The body did not arrive within {self._limits.body_s:g} s.") from exc
        if not is_complete:
            raise errors.ClientClosedRequest("The client disconnected while it was sending the body.")
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


def _too_large(limits: Limits, more: str = "The body has more") -> errors.PayloadTooLarge:
    return errors.PayloadTooLarge(
        f"{more} than the limit of {limits.max_body_bytes} bytes.", hint=f"An operator can raise {limits.body_key}."
    )


def media_type_of(content_type: str) -> str:
    """``type/subtype`` in lower case; empty without the header."""
    return content_type.partition(";")[0].strip().lower()


def is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


SWITCH_S = 0.0005
"""How long the event loop waits for the interpreter's lock while a body is read. An event of a stream needs the lock
several times, and Python's default is 5 ms."""
LONG_BYTES = 1024 * 1024
"""Shorter bodies do not wait for all longer ones of their caller."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One body. Implements QueueEntry."""

    key: str
    priority: int
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)


class BodyThread:
    """Reads one large body after the other, where the callers take turns: decision 5 says why one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies", initializer=sys.setswitchinterval, initargs=(SWITCH_S,))
        self._queue = FairQueue[_Turn]()
        self._current: _Turn | None = None

    async def read(self, read: Callable[[], Read], caller: Key, deadline: Deadline | None, *, is_long: bool) -> Read:
        """Returns ``read()``. If the wait is cancelled, what has not begun is not read.

        Raises the errors of ``read``, and DeadlineExceeded.
        """
        # A caller's long reads have a line of their own, so that short ones pass them.
        turn = _Turn(f"{caller.id}\0{is_long}", caller.priority)
        self._queue.add(turn)
        self._take_turn()
        try:
            async with asyncio.timeout(None if deadline is None else deadline.remaining_s()):
                await turn.has_begun.wait()
                return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        except TimeoutError as exc:
            raise errors.DeadlineExceeded("The deadline passed before the body was read.") from exc
        finally:
            self._queue.remove(turn)
            if self._current is turn:
                self._current = None
                self._take_turn()

    def _take_turn(self) -> None:
        if self._current is None and (turn := self._queue.take(lambda _: True)) is not None:
            self._current = turn
            turn.has_begun.set()


_thread = BodyThread()


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
    with nullcontext() if is_message else exchange.cancelled_on_disconnect():
        is_long = is_slow or len(body) >= LONG_BYTES
        return await _thread.read(partial(read, body), exchange.key, deadline, is_long=is_long)


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


def _malformed() -> errors.InvalidRequest:
    return errors.InvalidRequest("The body does not match its Content-Encoding.")


logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed form
MAX_PARTS = 128
MAX_HEADERS = 8
"""Limit for the headers of one part."""
MAX_HEADER_BYTES = 1024
"""Limit for each of them, and for the request's Content-Type."""
WINDOW_BYTES = 1024 * 1024
"""How much of the body is copied at once for the parser."""
_CHARSETS = {b"utf-8", b"utf8", b"us-ascii", b""}


class _Parts:
    """The parts of a form that the parser has found so far: the name and the content of each.

    Starlette's parser, over the same library, keeps the last of two parts of one name, and writes files to a disk.
    """

    def __init__(self, boundary: bytes, max_parts: int) -> None:
        self.found: list[tuple[str, bytes]] = []
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_part_data": lambda data, start, end: self._pieces.append(data[start:end]),
                "on_part_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._max_parts = max_parts
        self._field, self._value = bytearray(), bytearray()

    def _begin(self) -> None:
        self._disposition = b""
        self._pieces: list[bytes] = []

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _end(self) -> None:
        disposition, options = parse_options_header(self._disposition)
        if disposition != b"form-data" or b"name" not in options or len(self.found) == self._max_parts:
            raise _malformed_form()
        is_file = b"filename" in options or b"filename*=" in self._disposition
        content = b"".join(self._pieces)
        self.found.append((options[b"name"].decode(), FilePart(content) if is_file else content))


def parts_of(
    content_type: str, body: memoryview, lists: Collection[str] = (), max_parts: int = MAX_PARTS
) -> dict[str, bytes | list[bytes]]:
    """Parses a complete form (RFC 7578) in memory. Returns field -> content, a FilePart if the part has a file name.

    ``lists``: the fields that may have several parts. Their contents are lists, in the order of the parts.

    Raises UnsupportedMediaType, InvalidRequest or InvalidInput.
    """
    _, options = parse_options_header(content_type) if len(content_type) <= MAX_HEADER_BYTES else (b"", {})
    if options.get(b"charset", b"").lower() not in _CHARSETS:
        hint = "Send the form without a charset."
        raise errors.UnsupportedMediaType("The charset of a form can only be UTF-8.", hint=hint)
    if not options.get(b"boundary"):
        raise _malformed_form()
    try:
        parts = _Parts(options[b"boundary"], max_parts)
        for start in range(0, len(body), WINDOW_BYTES):
            parts.parser.write(bytes(body[start : start + WINDOW_BYTES]))
    except (FormParserError, UnicodeDecodeError) as exc:
        raise _malformed_form() from exc
    if parts.parser.state != MultipartState.END:
        raise _malformed_form()
    check_given_once(name for name, _ in parts.found if name not in lists)
    contents: dict[str, bytes | list[bytes]] = {name: content for name, content in parts.found if name not in lists}
    for name in lists:
        if files := [content for each, content in parts.found if each == name]:
            contents[name] = files
    return contents


def check_given_once(names: Iterable[str]) -> None:
    """Raises InvalidInput."""
    problems = [errors.FieldProblem(name, "is given twice") for name, count in Counter(names).items() if count > 1]
    if problems:
        raise errors.InvalidInput("A field is given twice.", errors=problems)


def _malformed_form() -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"The multipart body is malformed or above a limit: {MAX_PARTS} parts besides lists of files, {MAX_HEADERS} "
        f"headers for each part, {MAX_HEADER_BYTES} bytes for a header."
    )
