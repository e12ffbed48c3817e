"""Inflates bodies with a Content-Encoding in pieces, up to the limit of a body."""

import asyncio
import zlib
from collections.abc import Iterator

from app.api.exchange import Exchange
from app.api.limits import Limits
from app.domain.errors import InvalidRequest, PayloadTooLarge

READ_BYTES = 64 * 1024
"""Compressed bytes that are read at once. A larger body is inflated in a thread."""
PIECE_BYTES = 128 * 1024
"""Size of one piece. The pieces after the first one are inflated in a thread."""
MAX_SILENT_BYTES = 2 * READ_BYTES
"""Limit of compressed bytes without content: more than the longest header of a block or of gzip's extra field."""
_ANY_HEADER = zlib.MAX_WBITS | 32
"""Accepts gzip (RFC 1952) and zlib, which HTTP calls deflate (RFC 1950)."""


async def inflated(exchange: Exchange, body: memoryview, limits: Limits) -> memoryview:
    """Inflates one gzip or deflate stream. Raises InvalidRequest, PayloadTooLarge or TooManyRequests."""
    pieces, content = _pieces_of(body), bytearray()
    piece = next(pieces, b"") if len(body) <= READ_BYTES else await asyncio.to_thread(next, pieces, b"")
    while piece:
        exchange.hold(len(piece))
        content += piece
        if len(content) > limits.max_body_bytes:
            raise PayloadTooLarge(f"The body is larger than {limits.max_body_bytes} bytes, the limit of this gateway.")
        piece = await asyncio.to_thread(next, pieces, b"")
    return memoryview(content)


def _pieces_of(body: memoryview) -> Iterator[bytes]:
    """Raises InvalidRequest."""
    decompress = zlib.decompressobj(_ANY_HEADER)
    silent_bytes = 0
    try:
        for start in range(0, len(body), READ_BYTES):
            rest: bytes | memoryview = body[start : start + READ_BYTES]
            silent_bytes += len(rest)
            while piece := decompress.decompress(rest, PIECE_BYTES):
                silent_bytes = 0
                yield piece
                rest = decompress.unconsumed_tail
            if silent_bytes > MAX_SILENT_BYTES:
                raise _malformed()
            if decompress.eof and (decompress.unused_data or start + READ_BYTES < len(body)):
                raise _malformed()
    except zlib.error as exc:
        raise _malformed() from exc
    if not decompress.eof:
        raise _malformed()


def _malformed() -> InvalidRequest:
    return InvalidRequest("The body does not match its Content-Encoding.")
