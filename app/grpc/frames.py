"""HTTP/2 frames and header blocks. Sources: RFC 9113, sections 4 and 6 (frames) and 7 (error codes)."""

import struct

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from msgspec import Struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
HAS_PRIORITY = 0x20

HEADER_BYTES = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

HEADER = struct.Struct(">IBI")
"""The size of the content and the kind, flags, and the stream id."""


class Frame(Struct, gc=False):
    kind: int
    flags: int
    stream_id: int
    content: bytes


def frame_bytes(kind: int, flags: int, stream_id: int, content: bytes = b"") -> bytes:
    return HEADER.pack(len(content) << 8 | kind, flags, stream_id) + content


NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

Headers = tuple[tuple[bytes, bytes], ...]


class ConnectionFailed(Exception):
    """The error that ends a connection. ``code``: for GOAWAY to the peer.

    The peer violated the protocol, and the connection is unusable. Source: RFC 9113, 7.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
MAX_HEADER_LIST_SIZE = 6

MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
CONNECTION_WINDOW = 2**30
"""The window of the connection is large and always reopened. The windows of the streams limit the memory."""


STREAM_WINDOW = 64 * 1024
MAX_FRAME_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
"""Limits on what the peer may send."""


def integer_frame(kind: int, stream_id: int, value: int) -> bytes:
    """Encodes WINDOW_UPDATE or RST_STREAM."""
    return frame_bytes(kind, 0, stream_id, value.to_bytes(4, "big"))


def unpadded(frame: Frame) -> bytes:
    """Returns the content of DATA or HEADERS without its padding. Raises ConnectionFailed."""
    if not frame.flags & PADDED:
        return frame.content
    padding = frame.content[0] if frame.content else 0
    end = len(frame.content) - padding
    if end < 1:
        raise ConnectionFailed(PROTOCOL_ERROR, "a frame is all padding")
    return frame.content[1:end]


_MAX_CACHED_BLOCKS = 64
_FORM = END_HEADERS | PADDED | HAS_PRIORITY
_ENDLESS = 16
"""A header block above this multiple of the limit ends the connection; a smaller one above the limit its stream."""


class HeaderBlocks:
    """Assembles the header blocks of the peer from their frames, and decodes them.

    The dynamic table is disabled (SETTINGS_HEADER_TABLE_SIZE 0), so that equal blocks always have the same meaning,
    and each distinct block is decoded once.
    """

    def __init__(self) -> None:
        self.stream_id = 0
        """The stream whose block still lacks CONTINUATION frames; 0 if no block is incomplete."""
        self._is_end = False
        self._parts: list[bytes] = []
        self._size = 0
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._decoded: dict[bytes, Headers] = {}

    def take(self, frame: Frame) -> tuple[Headers | None, bool] | None:
        """Returns the headers of the block that HEADERS or CONTINUATION completes, and whether they end their stream.

        The headers are None if the block, or the list of its fields, is too large: a list counts names, values and 32
        bytes for each field. Raises ConnectionFailed.
        """
        part = frame.content
        if frame.kind == HEADERS:
            is_end = bool(frame.flags & END_STREAM)
            if frame.flags & _FORM == END_HEADERS and (known := self._decoded.get(part)) is not None:
                return known, is_end
            self.stream_id, self._is_end, self._parts, self._size = frame.stream_id, is_end, [], 0
            part = unpadded(frame)
            if frame.flags & HAS_PRIORITY:
                if len(part) < 5:
                    raise ConnectionFailed(FRAME_SIZE_ERROR, "HEADERS without its priority")
                part = part[5:]
        elif not self.stream_id:
            raise ConnectionFailed(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        # An empty part counts too, so that endless empty CONTINUATION frames end the connection.
        self._size += len(part) + 1
        if self._size > MAX_HEADER_BYTES * _ENDLESS:
            raise ConnectionFailed(ENHANCE_YOUR_CALM, "a header block has no end")
        if self._size <= MAX_HEADER_BYTES:
            self._parts.append(part)
        if not frame.flags & END_HEADERS:
            return None
        self.stream_id = 0
        return (self._headers() if self._size <= MAX_HEADER_BYTES else None), self._is_end

    def _headers(self) -> Headers | None:
        content = b"".join(self._parts)
        if (known := self._decoded.get(content)) is not None:
            return known
        try:
            headers = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(content, raw=True))
        except OversizedHeaderListError:
            return None  # there is no dynamic table, so the decoder needs nothing of this block for the next one
        except (HPACKError, ValueError, IndexError) as exc:
            raise ConnectionFailed(COMPRESSION_ERROR, "a header block cannot be decoded") from exc
        if len(self._decoded) < _MAX_CACHED_BLOCKS:
            self._decoded[content] = headers
        return headers
