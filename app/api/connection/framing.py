"""Finds the end of a request's body (RFC 9112, section 6), without I/O."""

import re
from typing import Protocol

from app.domain.errors import HeadersTooLarge, InvalidRequest

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
        self._read_line = self._read_size
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
            self._read_line(line)
        return end

    def _read_size(self, line: bytes) -> None:
        self._missing = int(_matching(_SIZE, line)[1], 16)
        if self._missing:
            self._read_line = self._read_end_of_chunk
        else:
            self._allowed = MAX_FRAMING_BYTES
            self._read_line = self._read_trailer

    def _read_end_of_chunk(self, line: bytes) -> None:
        if line != _END_OF_LINE:
            raise _invalid()
        self._read_line = self._read_size

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
