"""gRPC's framing of messages inside the body of a stream. Source: gRPC over HTTP/2, "Length-Prefixed-Message"."""

import struct
from collections.abc import Iterator

from app.triton.transport import BrokenExchange, RpcError

PREFIX_BYTES = 5
_PREFIX = struct.Struct(">BI")


def prefixed(message: bytes) -> bytes:
    """The message with its prefix, not compressed."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Puts messages together from pieces of a stream's body."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = PREFIX_BYTES
        """Bytes, the prefix included, that the next step needs."""

    @property
    def missing(self) -> int:
        """Bytes that the message under way still lacks, as far as its length is known."""
        return max(self._needed - self._size, 0)

    @property
    def is_between_messages(self) -> bool:
        return not self._size

    def messages(self, data: bytes) -> Iterator[bytes]:
        """The messages that ``data`` completes. Raises RpcError."""
        self._pieces.append(data)
        self._size += len(data)
        while self._size >= self._needed:
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._needed = end = PREFIX_BYTES + self._length_in(body)
            if self._size < end:
                self._pieces = [body]
                return
            self._pieces, self._size, self._needed = [body[end:]], self._size - end, PREFIX_BYTES
            yield body[PREFIX_BYTES:end]

    def _length_in(self, body: bytes) -> int:
        is_compressed, length = _PREFIX.unpack_from(body)
        if is_compressed:
            raise BrokenExchange("the server sent a compressed message, which was not asked for")
        if length > self._max_message_bytes:
            raise RpcError(
                "RESOURCE_EXHAUSTED", f"a message of {length} bytes; at most {self._max_message_bytes} are read"
            )
        return int(length)
