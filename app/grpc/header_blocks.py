"""Assembles the header blocks of the peer from their frames, and decodes them.

The dynamic table is disabled (SETTINGS_HEADER_TABLE_SIZE 0), so that equal blocks always have the same meaning,
and each distinct block is decoded once.
"""

from dataclasses import dataclass, field

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from app.grpc import frames
from app.grpc.frames import (
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    PROTOCOL_ERROR,
    ConnectionFailed,
    Frame,
    Headers,
    header_part_of,
)

_MAX_CACHED_BLOCKS = 64
_FORM = frames.END_HEADERS | frames.PADDED | frames.HAS_PRIORITY
_ENDLESS = 16
"""A header block above this multiple of the limit ends the connection; a smaller one above the limit its stream."""


@dataclass(slots=True)
class HeaderBlock:
    """A header block whose CONTINUATION frames are still to come."""

    stream_id: int
    is_end: bool
    max_bytes: int
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def is_too_large(self) -> bool:
        return self.size > self.max_bytes

    def add(self, part: bytes) -> None:
        """Raises ConnectionFailed if the block has no end. A part over the limit is not kept."""
        # An empty part counts too, so that endless empty CONTINUATION frames end the connection.
        self.size += len(part) + 1
        if self.size > self.max_bytes * _ENDLESS:
            raise ConnectionFailed(ENHANCE_YOUR_CALM, "a header block has no end")
        if not self.is_too_large:
            self.parts.append(part)


class HeaderBlocks:
    def __init__(self, max_bytes: int) -> None:
        self.unfinished: HeaderBlock | None = None
        self._max_bytes = max_bytes
        self._decoder = Decoder(max_header_list_size=max_bytes)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._decoded: dict[bytes, Headers] = {}

    def repeated(self, frame: Frame) -> Headers | None:
        """The headers of a frame that is a whole block, if the same block was decoded before."""
        return self._decoded.get(frame.content) if frame.flags & _FORM == frames.END_HEADERS else None

    def add(self, frame: Frame) -> HeaderBlock | None:
        """The block that HEADERS or CONTINUATION completes, if it does. Raises ConnectionFailed."""
        block = self._begin(frame) if frame.kind == frames.HEADERS else self._continue(frame)
        self.unfinished = None if frame.flags & frames.END_HEADERS else block
        return block if self.unfinished is None else None

    def headers_of(self, block: HeaderBlock) -> Headers | None:
        """Returns None if the block, or the list of its header fields, is too large. Raises ConnectionFailed."""
        if block.is_too_large:
            return None
        content = b"".join(block.parts)
        headers = self._decoded.get(content)
        if headers is None:
            headers = self._decode(content)
            if headers is not None and len(self._decoded) < _MAX_CACHED_BLOCKS:
                self._decoded[content] = headers
        return headers

    def _begin(self, frame: Frame) -> HeaderBlock:
        block = HeaderBlock(frame.stream_id, bool(frame.flags & frames.END_STREAM), self._max_bytes)
        block.add(header_part_of(frame))
        return block

    def _continue(self, frame: Frame) -> HeaderBlock:
        if self.unfinished is None:
            raise ConnectionFailed(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self.unfinished.add(frame.content)
        return self.unfinished

    def _decode(self, content: bytes) -> Headers | None:
        """Returns None if the size of the list is over the limit: names, values and 32 bytes for each field."""
        try:
            return tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(content, raw=True))
        except OversizedHeaderListError:
            return None  # there is no dynamic table, so the decoder needs nothing of this block for the next one
        except (HPACKError, ValueError, IndexError) as exc:
            raise ConnectionFailed(COMPRESSION_ERROR, "a header block cannot be decoded") from exc
