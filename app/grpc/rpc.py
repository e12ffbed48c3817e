"""The interface of a gRPC client: bytes in, bytes out. ``Client`` implements it; others may."""

from collections.abc import Sequence
from typing import Protocol, Self

Metadata = Sequence[tuple[str, str]]

LATER_S = 60.0
"""The server's deadline of a call is this much later than the caller's.

So the caller decides when a late call is cancelled: some servers crash when a deadline of their own passes.
"""
WAITED_S = 0.005
"""A message that took at least this long to arrive was not buffered: the reader is up to date."""
STATUSES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""The name of the status at each number."""


class RpcError(Exception):
    """A call that did not end with the status OK.

    ``code``: the name of the gRPC status. ``was_sent`` is False only if the server cannot have processed the request.
    ``is_answer``: whether the status is known to come from the server itself.
    """

    def __init__(self, code: str, details: str, *, was_sent: bool = True, is_answer: bool = False) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.was_sent = was_sent
        self.is_answer = is_answer


class BrokenExchange(RpcError):
    """The server or the client violated the gRPC protocol."""

    def __init__(self, details: str) -> None:
        super().__init__("INTERNAL", details)


class Call(Protocol):
    def done(self) -> bool:
        """Whether the call has ended: by its status, by the server's deadline or by :meth:`cancel`."""

    def cancel(self) -> None:
        """Ends the call and tells the server. A no-op for a call that has ended."""


class UnaryCall(Call, Protocol):
    async def response(self) -> bytes:
        """The response message. Cancelling this wait does not cancel the call. Raises RpcError."""


class StreamCall(Call, Protocol):
    """Yields the response messages. Cancelling the wait for one does not cancel the call."""

    @property
    def arrived(self) -> float | None:
        """When the last message arrived, in monotonic seconds."""

    @property
    def gap_s(self) -> float | None:
        """Seconds between the last two messages."""

    @property
    def waits_since(self) -> float | None:
        """Since when the reader has waited for the next message, in monotonic seconds; None while it does not wait."""

    @property
    def is_behind(self) -> bool:
        """Whether older messages are still buffered, so that arrival times do not show the model's pace."""

    def time_arrivals(self) -> None:
        """From now on :attr:`arrived` is exact: messages are read as they arrive, without pauses that save CPU time."""

    @property
    def is_receiving(self) -> bool:
        """Whether Triton is, or may be, in the middle of a message."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes:
        """Raises RpcError, or StopAsyncIteration after the status OK."""

    def interrupt(self, error: Exception) -> None:
        """Raises ``error`` in the reader's wait; the call goes on. A no-op while the reader does not wait."""

    def close(self) -> None:
        """Discards the messages that arrived but were not read."""


class Transport(Protocol):
    """``path``: ``/package.Service/Method``. ``message``: one serialized request.

    ``timeout_s``: how long the caller waits: for a connection, then for responses. After that the caller's wait raises
    RpcError with DEADLINE_EXCEEDED once, but the call goes on for up to LATER_S: the caller must cancel it.
    """

    async def unary(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> UnaryCall:
        """Starts a call with one response. Raises RpcError."""

    async def stream(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> StreamCall:
        """Starts a call with any number of responses. Raises RpcError."""

    async def close(self) -> None:
        """Closes the connection; running calls fail with UNAVAILABLE."""
