"""gRPC's framing of messages inside the body of a stream. Source: gRPC over HTTP/2, "Length-Prefixed-Message".

Reads the status of a gRPC call. Source: gRPC over HTTP/2 (PROTOCOL-HTTP2.md) and http-grpc-status-mapping.md.
"""

import struct
from collections.abc import Iterable, Iterator
from urllib.parse import unquote_to_bytes

from app.grpc.frames import Headers
from app.grpc.rpc import STATUSES, BrokenExchange, RpcError

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
            part = data[start:end]
            if self._pieces:
                part, self._pieces = b"".join((*self._pieces, part)), []
            start = end
            if self._has_prefix:
                self._has_prefix, self.missing = False, PREFIX_BYTES
                yield part
                continue
            is_compressed, length = _PREFIX.unpack(part)
            if is_compressed:
                raise BrokenExchange("the server sent a compressed message, which the client does not support")
            if length > self._max_message_bytes:
                text = f"a message of {length} bytes; at most {self._max_message_bytes} are read"
                raise RpcError("RESOURCE_EXHAUSTED", text)
            self._has_prefix, self.missing = True, int(length)
        if start < size:
            self.missing -= size - start
            self._pieces.append(data[start:])


_CODE_BY_HTTP_STATUS = {
    b"400": "INTERNAL",
    b"401": "UNAUTHENTICATED",
    b"403": "PERMISSION_DENIED",
    b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE",
    b"502": "UNAVAILABLE",
    b"503": "UNAVAILABLE",
    b"504": "UNAVAILABLE",
}
_CODE_BY_RESET = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
_REFUSED_STREAM = 7


def error_of_trailers(trailers: Headers) -> RpcError | None:
    """Returns the error in the trailers, or None for the status OK."""
    fields = dict(trailers)
    number = fields.get(b"grpc-status")
    if number == b"0":
        return None
    if number is None:
        return _error_of_http(fields.get(b":status", b""))
    code = STATUSES[int(number)] if number.isdigit() and len(number) < 3 and int(number) < len(STATUSES) else "UNKNOWN"
    text = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return RpcError(code, text, is_answer=True)


def error_of_head(headers: Headers) -> RpcError | None:
    """Returns an error if the response is not from a gRPC server but from a proxy. Ignores interim responses."""
    if (b":status", b"200") in headers:
        return None
    status = dict(headers).get(b":status", b"")
    return None if status.startswith(b"1") else _error_of_http(status)


def error_of_reset(code: int, reason: str) -> RpcError:
    """Returns the error of a stream that ended with RST_STREAM. ``reason``: empty if the server sent it."""
    details = reason or f"the server reset the stream with HTTP/2 error {code}"
    return RpcError(_CODE_BY_RESET.get(code, "INTERNAL"), details, was_sent=code != _REFUSED_STREAM)


def _error_of_http(status: bytes) -> RpcError:
    if status in (b"", b"200"):
        return BrokenExchange("the response has no gRPC status")
    return RpcError(
        _CODE_BY_HTTP_STATUS.get(status, "UNKNOWN"), f"the server answered with HTTP status {status.decode('latin-1')}"
    )
