"""Encodes and decodes the contents of frames; stateless. Source: RFC 9113, 6."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from app.triton.grpc import frames
from app.triton.grpc.events import FRAME_SIZE_ERROR, PROTOCOL_ERROR, ConnectionFailed, GoAway
from app.triton.grpc.frames import Frame, frame_bytes

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
class Limits:
    """Limits on what the peer may send."""

    stream_window: int = 64 * 1024
    max_frame_bytes: int = 1024 * 1024
    max_header_bytes: int = 64 * 1024


def start_bytes(limits: Limits) -> bytes:
    """Returns the first bytes of a connection: the preface, the client's settings and the connection's window."""
    settings = {
        HEADER_TABLE_SIZE: 0,
        ENABLE_PUSH: 0,
        INITIAL_WINDOW_SIZE: limits.stream_window,
        MAX_FRAME_SIZE: limits.max_frame_bytes,
        MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }
    content = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
    own = frame_bytes(frames.SETTINGS, 0, 0, content)
    return frames.PREFACE + own + integer_frame(frames.WINDOW_UPDATE, 0, CONNECTION_WINDOW - DEFAULT_WINDOW)


def integer_frame(kind: int, stream_id: int, value: int) -> bytes:
    """Encodes WINDOW_UPDATE or RST_STREAM."""
    return frame_bytes(kind, 0, stream_id, _INTEGER.pack(value))


def goaway_frame(code: int) -> bytes:
    return frame_bytes(frames.GOAWAY, 0, 0, _GOAWAY.pack(0, code))


def integer_of(frame: Frame) -> int:
    """Decodes the content of WINDOW_UPDATE or RST_STREAM. Raises ConnectionFailed."""
    if len(frame.content) != _INTEGER.size:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "a frame of the wrong size")
    return int(_INTEGER.unpack(frame.content)[0])


def settings_of(frame: Frame) -> Iterator[tuple[int, int]]:
    """Decodes the names and values; an acknowledgement has none. Raises ConnectionFailed."""
    if frame.stream_id or len(frame.content) % 6 or (frame.flags & frames.ACK and frame.content):
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
    if not frame.flags & frames.HAS_PRIORITY:
        return content
    if len(content) < 5:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "HEADERS without its priority")
    return content[5:]


def unpadded(frame: Frame) -> bytes:
    """Returns the content of DATA or HEADERS without its padding. Raises ConnectionFailed."""
    if not frame.flags & frames.PADDED:
        return frame.content
    padding = frame.content[0] if frame.content else 0
    end = len(frame.content) - padding
    if end < 1:
        raise ConnectionFailed(PROTOCOL_ERROR, "a frame is all padding")
    return frame.content[1:end]
