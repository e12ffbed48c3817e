"""Assembles the header blocks of the peer from their frames, and decodes them.

The dynamic table is disabled (SETTINGS_HEADER_TABLE_SIZE 0), so that equal blocks always have the same meaning,
and each distinct block is decoded once.
"""

from dataclasses import dataclass, field

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from app.grpc.frames import (
    COMPRESSION_ERROR,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PROTOCOL_ERROR,
    ConnectionFailed,
    Frame,
    Headers,
    unpadded,
)

_MAX_CACHED_BLOCKS = 64
_FORM = END_HEADERS | PADDED | HAS_PRIORITY
_ENDLESS = 16
"""A header block above this multiple of the limit ends the connection; a smaller one above the limit its stream."""


@dataclass(slots=True)
class HeaderBlock:
    """A header block whose CONTINUATION frames are still to come."""

    stream_id: int
    is_end: bool
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class HeaderBlocks:
    def __init__(self, max_bytes: int) -> None:
        self.unfinished: HeaderBlock | None = None
        self._max_bytes = max_bytes
        self._decoder = Decoder(max_header_list_size=max_bytes)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._decoded: dict[bytes, Headers] = {}

    def repeated(self, frame: Frame) -> Headers | None:
        """The headers of a frame that is a whole block, if the same block was decoded before."""
        return self._decoded.get(frame.content) if frame.flags & _FORM == END_HEADERS else None

    def add(self, frame: Frame) -> HeaderBlock | None:
        """The block that HEADERS or CONTINUATION completes, if it does. Raises ConnectionFailed.

        A part over the limit is not kept.
        """
        block, part = self.unfinished, frame.content
        if frame.kind == HEADERS:
            block, part = HeaderBlock(frame.stream_id, bool(frame.flags & END_STREAM)), unpadded(frame)
            if frame.flags & HAS_PRIORITY:
                if len(part) < 5:
                    raise ConnectionFailed(FRAME_SIZE_ERROR, "HEADERS without its priority")
                part = part[5:]
        if block is None:
            raise ConnectionFailed(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        # An empty part counts too, so that endless empty CONTINUATION frames end the connection.
        block.size += len(part) + 1
        if block.size > self._max_bytes * _ENDLESS:
            raise ConnectionFailed(ENHANCE_YOUR_CALM, "a header block has no end")
        if block.size <= self._max_bytes:
            block.parts.append(part)
        self.unfinished = None if frame.flags & END_HEADERS else block
        return block if self.unfinished is None else None

    def headers_of(self, block: HeaderBlock) -> Headers | None:
        """Returns None if the block, or the list of its header fields, is too large. Raises ConnectionFailed.

        The size of a list counts names, values and 32 bytes for each field.
        """
        if block.size > self._max_bytes:
            return None
        content = b"".join(block.parts)
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
