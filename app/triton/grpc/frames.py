"""HTTP/2 frames as bytes. Source: RFC 9113, sections 4 and 6."""

import struct
from collections.abc import Iterator

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
