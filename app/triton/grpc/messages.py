"""gRPC's framing of messages inside the body of a stream. Source: gRPC over HTTP/2, "Length-Prefixed-Message"."""

import struct
from collections.abc import Iterable, Iterator

from app.triton.transport import BrokenExchange, RpcError

PREFIX_BYTES = 5
_PREFIX = struct.Struct(">BI")


def prefix_of(message: bytes) -> bytes:
    """Returns the prefix of an uncompressed message."""
    return _PREFIX.pack(0, len(message))


class MessageReader:
    """Assembles messages from pieces of a stream's body. Each message is copied once, when it is complete."""

    __slots__ = ("_has_prefix", "_max_message_bytes", "_pieces", "missing")

    def __init__(self, max_message_bytes: int) -> None:
        self.missing = PREFIX_BYTES
        """Bytes that are missing from the current message, or from its prefix while the length is unknown."""
        self._max_message_bytes = max_message_bytes
        self._has_prefix = False
        self._pieces: list[bytes] = []
        """The received pieces of the message or its prefix."""

    @property
    def is_between_messages(self) -> bool:
        return not self._has_prefix and self.missing == PREFIX_BYTES

    def messages(self, data: bytes) -> Iterable[bytes]:
        """Returns the messages that ``data`` completes. They may be yielded one by one, and then raise RpcError."""
        if self.missing == PREFIX_BYTES and not self._has_prefix and len(data) > PREFIX_BYTES:
            is_compressed, length = _PREFIX.unpack_from(data)
            if length == len(data) - PREFIX_BYTES and length <= self._max_message_bytes and not is_compressed:
                return (data[PREFIX_BYTES:],)  # the usual piece: one whole message
        return self._assembled(data)

    def _assembled(self, data: bytes) -> Iterator[bytes]:
        start, size = 0, len(data)
        while size - start >= self.missing:
            end = start + self.missing
            part = self._whole(data[start:end]) if self._pieces else data[start:end]
            start = end
            if self._has_prefix:
                self._has_prefix, self.missing = False, PREFIX_BYTES
                yield part
            else:
                self._has_prefix, self.missing = True, self._length_in(part)
        if start < size:
            self.missing -= size - start
            self._pieces.append(data[start:])

    def _whole(self, last: bytes) -> bytes:
        self._pieces.append(last)
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def _length_in(self, prefix: bytes) -> int:
        is_compressed, length = _PREFIX.unpack(prefix)
        if is_compressed:
            raise BrokenExchange(
                "the server sent a compressed message, although the client does not support compression"
            )
        if length > self._max_message_bytes:
            raise RpcError(
                "RESOURCE_EXHAUSTED", f"a message of {length} bytes; at most {self._max_message_bytes} are read"
            )
        return int(length)
