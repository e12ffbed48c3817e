"""Reads a chunked body (RFC 9112, section 7.1). No I/O."""

import re
from typing import Protocol

from app.core.errors import HeadersTooLarge, InvalidRequest

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
_END_OF_LINE = re.compile(rb"\r\n")


class BodySink(Protocol):
    """Receives a body: a part is passed to :meth:`add`, or received into :meth:`room` and reported by :meth:`filled`.

    If one of them raises GatewayError, the rest of the body is not received.
    """

    def add(self, part: bytes) -> None: ...

    def room(self, size: int) -> memoryview:
        """Memory for the next ``size`` bytes."""

    def filled(self, size: int) -> None:
        """``size`` bytes were received into the room."""


class ChunkedBody:
    """A chunked body. Chunk extensions and trailers are checked, counted and dropped: no trailer acts as a header."""

    def __init__(self) -> None:
        self.is_complete = False
        self._awaited = _SIZE
        """The form of the next line."""
        self._line = bytearray()
        """The received part of an incomplete line."""
        self._missing = 0
        """Bytes of the current chunk that are still missing."""
        self._allowed = MAX_FRAMING_BYTES
        """Bytes of framing that are still allowed."""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns the data of the body, and the rest: the bytes after its end, or bytes to feed in another step.

        Raises InvalidRequest or HeadersTooLarge.
        """
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
            self._read(line)
        return end

    def _read(self, line: bytes) -> None:
        """The size of a chunk, or with ``_awaited`` the end of its data, or a trailer."""
        if self._awaited is _SIZE:
            self._missing = int(_matching(_SIZE, line)[1], 16)
            self._awaited = _END_OF_LINE if self._missing else _TRAILER
            if not self._missing:
                self._allowed = MAX_FRAMING_BYTES
        elif self._awaited is _END_OF_LINE:
            _matching(_END_OF_LINE, line)
            self._awaited = _SIZE
        elif line == b"\r\n":
            self.is_complete = True
        else:
            _matching(_TRAILER, line)


def _matching(pattern: re.Pattern[bytes], line: bytes) -> re.Match[bytes]:
    match = pattern.fullmatch(line)
    if match is None:
        raise InvalidRequest("The chunked body is not valid HTTP.")
    return match
