"""Checks a request's head, finds the end of its body (RFC 9112, section 6), and receives the bytes of a connection.

The checks and the framing (``body_of``, ``LengthBody``, ``ChunkedBody``) do no I/O. ``Receiver`` receives the bytes,
those of a large body directly into the memory of the body, without a copy.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from app.api.exchange import BodySink
from app.core.errors import GatewayError, HeadersTooLarge, InvalidRequest

MAX_FRAMING_BYTES = 16 * 1024
"""Limit for the trailers of a chunked body, and separately for its other framing."""
CHUNKS_AT_ONCE = 1024
"""Limit of the chunks that are decoded in one step of the event loop, a few milliseconds."""
FRAMING_PER_BYTE = 8
"""Bytes of framing that each byte of data allows. A chunk of one byte needs five."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;%b(?:=(?:%b|%b))?)*\r\n" % (_TOKEN, _TOKEN, _QUOTED))
_TRAILER = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n")
_END_OF_LINE = b"\r\n"


class Body(Protocol):
    """A body that is being received."""

    @property
    def is_complete(self) -> bool: ...

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns the data of the body, and the rest: the bytes after its end, or bytes to feed in another step.

        Raises InvalidRequest or HeadersTooLarge.
        """


class LengthBody:
    """A body of ``Content-Length`` bytes. ``missing``: how many of them have not been received yet."""

    def __init__(self, length: int) -> None:
        self.missing = length

    @property
    def is_complete(self) -> bool:
        return self.missing == 0

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        body = data[: self.missing]
        self.missing -= len(body)
        return body, data[len(body) :]


class ChunkedBody:
    """A chunked body. Chunk extensions and trailers are checked, counted and dropped: no trailer acts as a header."""

    def __init__(self) -> None:
        self.is_complete = False
        self._read_line = ChunkedBody._read_size
        """The method for the next line, not bound: only a garbage collection frees what refers to itself."""
        self._line = bytearray()
        """The received part of an incomplete line."""
        self._missing = 0
        """Bytes of the current chunk that are still missing."""
        self._allowed = MAX_FRAMING_BYTES
        """Bytes of framing that are still allowed."""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.is_complete and len(pieces) < CHUNKS_AT_ONCE:
            if self._missing:
                piece = data[at : at + self._missing]
                pieces.append(piece)
                at += len(piece)
                self._missing -= len(piece)
                self._allowed += FRAMING_PER_BYTE * len(piece)
            else:
                at = self._feed_line(data, at)
        return b"".join(pieces), data[at:]

    def _feed_line(self, data: bytes, at: int) -> int:
        """Returns where the line ends."""
        end = data.find(b"\n", at) + 1 or len(data)
        self._allowed -= end - at
        if self._allowed < 0:
            raise HeadersTooLarge(f"The trailers or chunk extensions are larger than {MAX_FRAMING_BYTES} bytes.")
        self._line += data[at:end]
        if self._line.endswith(b"\n"):
            line = bytes(self._line)
            self._line.clear()
            self._read_line(self, line)
        return end

    def _read_size(self, line: bytes) -> None:
        self._missing = int(_matching(_SIZE, line)[1], 16)
        if self._missing:
            self._read_line = ChunkedBody._read_end_of_chunk
        else:
            self._allowed = MAX_FRAMING_BYTES
            self._read_line = ChunkedBody._read_trailer

    def _read_end_of_chunk(self, line: bytes) -> None:
        if line != _END_OF_LINE:
            raise _invalid()
        self._read_line = ChunkedBody._read_size

    def _read_trailer(self, line: bytes) -> None:
        if line == _END_OF_LINE:
            self.is_complete = True
        else:
            _matching(_TRAILER, line)


def _matching(pattern: re.Pattern[bytes], line: bytes) -> re.Match[bytes]:
    match = pattern.fullmatch(line)
    if match is None:
        raise _invalid()
    return match


def _invalid() -> InvalidRequest:
    return InvalidRequest("The chunked body is not valid HTTP.")


MAX_HEAD_BYTES = 16 * 1024
END_OF_HEAD = b"\r\n\r\n"
VERSIONS = {"1.0", "1.1"}

_HOST = re.compile(rb"[0-9A-Za-z._~!$&'()*+,;=:%\[\]-]*")


def end_of_head(before: bytes, data: bytes) -> int:
    """Returns the end of the first empty line in ``data``, or its length. ``before``: the bytes before ``data``."""
    if before:
        before = before[1 - len(END_OF_HEAD) :]
        across = (before + data[: len(END_OF_HEAD) - 1]).find(END_OF_HEAD)
        if across >= 0:
            return across + len(END_OF_HEAD) - len(before)
    inside = data.find(END_OF_HEAD)
    return inside + len(END_OF_HEAD) if inside >= 0 else len(data)


def body_of(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Body:
    """Returns the body to receive, for headers with names in lower case.

    Makes the checks of a head that the parser lacks. Raises InvalidRequest if two servers could disagree about the
    request's host or its end.
    """
    if version not in VERSIONS:
        raise InvalidRequest("The gateway speaks HTTP/1.1 and HTTP/1.0.")
    hosts: list[bytes] = []
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    wanted = {b"host": hosts, b"content-length": lengths, b"transfer-encoding": encodings}
    for name, value in headers:
        if name in wanted:
            wanted[name].append(value.strip(b" \t"))
    _check_host(version, hosts)
    if encodings:
        _check_encoding(version, encodings, lengths)
        return ChunkedBody()
    if not lengths:
        return LengthBody(0)
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise InvalidRequest("The request must have one Content-Length, a number.")
    return LengthBody(int(lengths[0]))


def _check_host(version: str, hosts: list[bytes]) -> None:
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidRequest("The request must have exactly one Host header.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidRequest("The Host header is not a valid host.")


def _check_encoding(version: str, encodings: list[bytes], lengths: list[bytes]) -> None:
    if version == "1.0" or lengths or [encoding.lower() for encoding in encodings] != [b"chunked"]:
        raise InvalidRequest("The only Transfer-Encoding is 'chunked', in HTTP/1.1, without a Content-Length.")


LARGE_BYTES = 64 * 1024
"""The smallest number of missing bytes that are received directly into the memory of their body."""
MOST_AT_ONCE = 1024 * 1024
"""Limit of the bytes received in one step of the event loop, a fraction of a millisecond."""
HEAD_BYTES = 16 * 1024
"""The most bytes that are received with a head. The application must see the head before it has memory for the body."""
PART_BYTES = 256 * 1024
"""The most bytes of a body that are received at once and copied."""
FRAMES_BYTES = 4 * 1024
"""The most bytes of a WebSocket's frames that are received at once, up to 2,000 frames. A large frame gets more."""


class ReceivingRoom:
    """The memory into which the connections of one event loop receive, one after the other."""

    def __init__(self) -> None:
        self.part = memoryview(bytearray(PART_BYTES))
        self.head = self.part[:HEAD_BYTES]
        self.frames = self.part[:FRAMES_BYTES]


class LargeBody:
    """A body that is received into the memory of its sink. ``on_complete`` is called with its last byte."""

    def __init__(self, body: LengthBody, sink: BodySink, on_complete: Callable[[], None]) -> None:
        self.error: GatewayError | None = None
        self.ended = asyncio.Event()
        self._body = body
        self._sink = sink
        self._on_complete = on_complete

    def room(self) -> memoryview:
        return self._sink.room(min(self._body.missing, MOST_AT_ONCE))

    def filled(self, size: int) -> None:
        self._body.missing -= size
        try:
            self._sink.filled(size)
        except GatewayError as error:
            self.error = error
        if self.error is not None:
            self.ended.set()
        elif self._body.is_complete:
            self._on_complete()
            self.ended.set()


_NOBODY = asyncio.Protocol()
"""The owner of a receiver whose connection is lost."""


class Receiver(asyncio.BufferedProtocol):
    """Receives the bytes of a connection, those of a large body without a copy.

    The protocol of a connection's transport, because uvicorn's protocol, ``owner``, cannot choose the memory.
    """

    __slots__ = ("_owner", "_room", "_small_room", "is_in_body", "large_body")

    def __init__(self, owner: asyncio.Protocol, room: ReceivingRoom) -> None:
        self.is_in_body = False
        """Whether a head has arrived, but not all of its body; of a WebSocket, whether a large frame is arriving."""
        self.large_body: LargeBody | None = None
        """The body that receives the next bytes, instead of ``owner``."""
        self._owner = owner
        self._room = room
        self._small_room = room.head

    def switch_to(self, owner: asyncio.Protocol) -> None:
        """``owner`` receives the frames of a WebSocket from now on."""
        self._owner, self._small_room = owner, self._room.frames

    def get_buffer(self, _size_hint: int) -> memoryview:
        if self.large_body is not None:
            return self.large_body.room()
        return self._room.part if self.is_in_body else self._small_room

    def buffer_updated(self, size: int) -> None:
        if self.large_body is None:
            self._owner.data_received(bytes(self._room.part[:size]))
            return
        self.large_body.filled(size)
        if self.large_body.ended.is_set():
            self.large_body = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the owner, which refers to this receiver: only a garbage collection would free the two."""
        owner, self._owner = self._owner, _NOBODY
        owner.connection_lost(exc)
        self._end_body()

    def eof_received(self) -> bool | None:
        self._end_body()
        return self._owner.eof_received()

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def _end_body(self) -> None:
        if self.large_body is not None:
            self.large_body.ended.set()
            self.large_body = None
