"""Encodes and decodes HTTP/2 frames and their contents as bytes, and defines the events of an HTTP/2 session.

Source: RFC 9113, sections 4 and 6 (frames) and 7 (error codes).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
HAS_PRIORITY = 0x20

HEADER_BYTES = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_HEADER = struct.Struct(">IBI")
"""The size of the content and the kind, flags, and the stream id."""
_STREAM_ID = 0x7FFF_FFFF


class Frame(Struct, gc=False):
    kind: int
    flags: int
    stream_id: int
    content: bytes


class FrameBuffer:
    """Assembles frames from received bytes, which may be split anywhere."""

    def __init__(self, max_content_bytes: int) -> None:
        self._max_content_bytes = max_content_bytes
        self._rest = b""
        """The start of a frame's header."""
        self._cut: Frame | None = None
        """An incomplete frame. The pieces of its content are joined once."""
        self._pieces: list[bytes] = []
        self._missing = 0

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that ``data`` completes. Raises ConnectionFailed."""
        start = 0
        if self._cut is not None:
            start = self._missing
            self._pieces.append(data[:start])
            if len(data) < start:
                self._missing -= len(data)
                return
            frame, self._cut = self._cut, None
            frame.content = b"".join(self._pieces)
            yield frame
        elif self._rest:
            data = self._rest + data
        end, limit, unpack = len(data), self._max_content_bytes, _HEADER.unpack_from
        while end - start >= HEADER_BYTES:
            size_and_kind, flags, stream_id = unpack(data, start)
            size = size_and_kind >> 8
            if size > limit:
                raise ConnectionFailed(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            start += HEADER_BYTES
            after = start + size
            frame = Frame(size_and_kind & 0xFF, flags, stream_id & _STREAM_ID, data[start:after])
            if after > end:
                self._cut, self._pieces, self._missing = frame, [frame.content], after - end
                self._rest = b""
                return
            start = after
            yield frame
        self._rest = data[start:]


def frame_bytes(kind: int, flags: int, stream_id: int, content: bytes = b"") -> bytes:
    return _HEADER.pack(len(content) << 8 | kind, flags, stream_id) + content


def frame_header(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    """Returns the header of a frame whose content has ``size`` bytes."""
    return _HEADER.pack(size << 8 | kind, flags, stream_id)


NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

Headers = tuple[tuple[bytes, bytes], ...]


class ConnectionFailed(Exception):
    """The error that ends a connection. ``code``: for GOAWAY to the peer.

    The peer violated the protocol, and the connection cannot be used any more. Source: RFC 9113, 7.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class HeadersReceived(Struct, gc=False):
    stream_id: int
    headers: Headers
    is_end: bool


class DataReceived(Struct, gc=False):
    """``size``: the used bytes of the stream's window, which ``Session.acknowledge`` returns."""

    stream_id: int
    data: bytes
    size: int
    is_end: bool


class StreamReset(Struct, gc=False):
    """``reason``: empty if the peer reset the stream, otherwise why the session reset it."""

    stream_id: int
    code: int
    reason: str = ""


class GoAway(Struct, gc=False):
    """The peer did not process streams above ``last_stream_id`` and accepts no new ones."""

    last_stream_id: int
    code: int


Event = HeadersReceived | DataReceived | StreamReset | GoAway


HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
MAX_HEADER_LIST_SIZE = 6

MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
CONNECTION_WINDOW = 2**30
"""The window of the connection is large and always reopened. The windows of the streams limit the memory."""


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits on what the peer may send."""

    stream_window: int = 64 * 1024
    max_frame_bytes: int = 1024 * 1024
    max_header_bytes: int = 64 * 1024


def integer_frame(kind: int, stream_id: int, value: int) -> bytes:
    """Encodes WINDOW_UPDATE or RST_STREAM."""
    return frame_bytes(kind, 0, stream_id, value.to_bytes(4, "big"))


def integer_of(frame: Frame) -> int:
    """Decodes the content of WINDOW_UPDATE or RST_STREAM. Raises ConnectionFailed."""
    if len(frame.content) != 4:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "a frame of the wrong size")
    return int.from_bytes(frame.content, "big")


def unpadded(frame: Frame) -> bytes:
    """Returns the content of DATA or HEADERS without its padding. Raises ConnectionFailed."""
    if not frame.flags & PADDED:
        return frame.content
    padding = frame.content[0] if frame.content else 0
    end = len(frame.content) - padding
    if end < 1:
        raise ConnectionFailed(PROTOCOL_ERROR, "a frame is all padding")
    return frame.content[1:end]
