"""The events of an HTTP/2 session, and the error that ends a connection. Source: RFC 9113, 7."""

from msgspec import Struct

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

Headers = tuple[tuple[bytes, bytes], ...]


class ConnectionFailed(Exception):
    """The peer violated the protocol, and the connection cannot be used any more. ``code``: for GOAWAY to the peer."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class HeadersReceived(Struct, gc=False):
    stream_id: int
    headers: Headers
    is_end: bool


class DataReceived(Struct, gc=False):
    """``size``: the used bytes of the stream's window, which ``Session.acknowledge`` returns."""

    stream_id: int
    data: bytes
    size: int
    is_end: bool


class StreamReset(Struct, gc=False):
    """``reason``: empty if the peer reset the stream, otherwise why the session reset it."""

    stream_id: int
    code: int
    reason: str = ""


class GoAway(Struct, gc=False):
    """The peer did not process streams above ``last_stream_id`` and accepts no new ones."""

    last_stream_id: int
    code: int


class PingAcknowledged(Struct, gc=False):
    content: bytes


Event = HeadersReceived | DataReceived | StreamReset | GoAway | PingAcknowledged
