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


class FrameTooLarge(Exception):
    """The peer sent a frame larger than SETTINGS_MAX_FRAME_SIZE allows."""


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
        """Yields the frames that ``data`` completes. Raises FrameTooLarge."""
        start = 0
        if self._cut is not None:
            if len(data) < self._missing:
                self._keep(data)
                return
            start = self._missing
            yield self._completed(self._cut, data[:start])
        elif self._rest:
            data = self._rest + data
        end, limit, unpack = len(data), self._max_content_bytes, _HEADER.unpack_from
        while end - start >= HEADER_BYTES:
            size_and_kind, flags, stream_id = unpack(data, start)
            size = size_and_kind >> 8
            if size > limit:
                raise FrameTooLarge(f"a frame of {size} bytes")
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

    def _keep(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._missing -= len(piece)

    def _completed(self, frame: Frame, last: bytes) -> Frame:
        frame.content = b"".join((*self._pieces, last))
        self._cut, self._pieces = None, []
        return frame


def frame_bytes(kind: int, flags: int, stream_id: int, content: bytes = b"") -> bytes:
    return _HEADER.pack(len(content) << 8 | kind, flags, stream_id) + content


def frame_header(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    """Returns the header of a frame whose content has ``size`` bytes."""
    return _HEADER.pack(size << 8 | kind, flags, stream_id)


def header_frames(stream_id: int, block: bytes, max_content_bytes: int) -> Iterator[bytes]:
    """Yields HEADERS and the CONTINUATION frames of a header block, which must follow it without a gap."""
    kind, end = HEADERS, len(block)
    for start in range(0, end, max_content_bytes):
        after = start + max_content_bytes
        yield frame_bytes(kind, END_HEADERS if after >= end else 0, stream_id, block[start:after])
        kind = CONTINUATION


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

_SETTING = struct.Struct(">HI")
_INTEGER = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits on what the peer may send."""

    stream_window: int = 64 * 1024
    max_frame_bytes: int = 1024 * 1024
    max_header_bytes: int = 64 * 1024


def start_bytes(limits: PeerLimits) -> bytes:
    """Returns the first bytes of a connection: the preface, the client's settings and the connection's window."""
    settings = {
        HEADER_TABLE_SIZE: 0,
        ENABLE_PUSH: 0,
        INITIAL_WINDOW_SIZE: limits.stream_window,
        MAX_FRAME_SIZE: limits.max_frame_bytes,
        MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }
    content = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
    own = frame_bytes(SETTINGS, 0, 0, content)
    return PREFACE + own + integer_frame(WINDOW_UPDATE, 0, CONNECTION_WINDOW - DEFAULT_WINDOW)


def integer_frame(kind: int, stream_id: int, value: int) -> bytes:
    """Encodes WINDOW_UPDATE or RST_STREAM."""
    return frame_bytes(kind, 0, stream_id, _INTEGER.pack(value))


def goaway_frame(code: int) -> bytes:
    return frame_bytes(GOAWAY, 0, 0, _GOAWAY.pack(0, code))


def integer_of(frame: Frame) -> int:
    """Decodes the content of WINDOW_UPDATE or RST_STREAM. Raises ConnectionFailed."""
    if len(frame.content) != _INTEGER.size:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "a frame of the wrong size")
    return int(_INTEGER.unpack(frame.content)[0])


def settings_of(frame: Frame) -> Iterator[tuple[int, int]]:
    """Decodes the names and values; an acknowledgement has none. Raises ConnectionFailed."""
    if frame.stream_id or len(frame.content) % 6 or (frame.flags & ACK and frame.content):
        raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed SETTINGS")
    return _SETTING.iter_unpack(frame.content)


def ping_of(frame: Frame) -> bytes:
    """Raises ConnectionFailed."""
    if frame.stream_id or len(frame.content) != 8:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed PING")
    return frame.content


def goaway_of(frame: Frame) -> GoAway:
    """Raises ConnectionFailed."""
    if frame.stream_id or len(frame.content) < _GOAWAY.size:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed GOAWAY")
    last_stream_id, code = _GOAWAY.unpack_from(frame.content)
    return GoAway(last_stream_id & MAX_WINDOW, code)


def header_part_of(frame: Frame) -> bytes:
    """Returns the part of the header block that HEADERS contains. Raises ConnectionFailed."""
    content = unpadded(frame)
    if not frame.flags & HAS_PRIORITY:
        return content
    if len(content) < 5:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "HEADERS without its priority")
    return content[5:]


def unpadded(frame: Frame) -> bytes:
    """Returns the content of DATA or HEADERS without its padding. Raises ConnectionFailed."""
    if not frame.flags & PADDED:
        return frame.content
    padding = frame.content[0] if frame.content else 0
    end = len(frame.content) - padding
    if end < 1:
        raise ConnectionFailed(PROTOCOL_ERROR, "a frame is all padding")
    return frame.content[1:end]
