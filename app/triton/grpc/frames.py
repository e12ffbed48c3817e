"""HTTP/2 frames as bytes. Source: RFC 9113, sections 4 and 6."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
HAS_PRIORITY = 0x20

HEADER_BYTES = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_HEADER = struct.Struct(">HBBBI")
_STREAM_ID = 0x7FFF_FFFF


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    content: bytes


class FrameTooLarge(Exception):
    """The peer sent a frame larger than SETTINGS_MAX_FRAME_SIZE allows."""


class FrameBuffer:
    """Turns received bytes into frames, however the bytes are cut."""

    def __init__(self, max_content_bytes: int) -> None:
        self._max_content_bytes = max_content_bytes
        self._rest = b""

    def frames(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises FrameTooLarge."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        start, end = 0, len(data)
        while end - start >= HEADER_BYTES:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(data, start)
            size = high << 8 | low
            if size > self._max_content_bytes:
                raise FrameTooLarge(f"a frame of {size} bytes")
            content_start = start + HEADER_BYTES
            if content_start + size > end:
                break
            start = content_start + size
            yield Frame(kind, flags, stream_id & _STREAM_ID, data[content_start:start])
        self._rest = data[start:]


def frame_bytes(kind: int, flags: int, stream_id: int, content: bytes = b"") -> bytes:
    size = len(content)
    return _HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + content
