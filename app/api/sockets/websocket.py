"""The interface between a WebSocket's connection and the code that runs its messages, and the reasons of its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from app.core.errors import (
    ClientClosedRequest,
    Forbidden,
    GatewayError,
    SessionLost,
    SlowConsumer,
    Unauthenticated,
    UnknownSession,
)


class CloseReason(StrEnum):
    """Why a WebSocket ended. Metrics and the log use only these values."""

    CLIENT = "client"
    LOST = "lost"
    DRAINING = "draining"
    PROTOCOL_ERROR = "protocol_error"
    INVALID_TEXT = "invalid_text"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    SESSION_ENDED = "unknown_session"
    SESSION_LOST = "session_lost"
    SLOW_CONSUMER = "slow_consumer"
    SLOW_MESSAGE = "slow_message"
    TOO_MANY_FRAMES = "too_many_frames"
    TOO_LARGE = "payload_too_large"
    PING_TIMEOUT = "ping_timeout"
    INTERNAL = "internal"
    TOO_MANY_REQUESTS = "too_many_requests"
    IDLE = "idle"


CODE_BY_REASON = {
    CloseReason.DRAINING: 1001,
    CloseReason.PROTOCOL_ERROR: 1002,
    CloseReason.INVALID_TEXT: 1007,
    CloseReason.UNAUTHENTICATED: 1008,
    CloseReason.FORBIDDEN: 1008,
    CloseReason.SLOW_CONSUMER: 1008,
    CloseReason.SLOW_MESSAGE: 1008,
    CloseReason.TOO_MANY_FRAMES: 1008,
    CloseReason.TOO_LARGE: 1009,
    CloseReason.PING_TIMEOUT: 1011,
    CloseReason.INTERNAL: 1011,
    CloseReason.TOO_MANY_REQUESTS: 1013,
    CloseReason.IDLE: 1013,
    CloseReason.SESSION_ENDED: 4404,
    CloseReason.SESSION_LOST: 4410,
}
"""The close codes that the gateway sends (RFC 6455, section 7.4, and its registry). Those from 4000 on are its own."""


REASON_BY_ERROR: dict[type[GatewayError], CloseReason] = {
    Unauthenticated: CloseReason.UNAUTHENTICATED,
    Forbidden: CloseReason.FORBIDDEN,
    UnknownSession: CloseReason.SESSION_ENDED,
    SessionLost: CloseReason.SESSION_LOST,
}
"""The errors of a message that also end its WebSocket."""


def cause_of(reason: CloseReason) -> GatewayError:
    """The error of the requests that the end of their WebSocket cancels."""
    if reason is CloseReason.SLOW_CONSUMER:
        return SlowConsumer("The client did not read the WebSocket.")
    return ClientClosedRequest(f"The WebSocket ended: {reason}.")


class Message(Struct, frozen=True, eq=False):
    """A whole message. The bytes count as memory of its WebSocket until ``release`` is called."""

    data: bytes
    is_text: bool
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class SocketTerms:
    """The limits of one WebSocket.

    ``hold``: counts received bytes, or raises TooManyRequests; ``release``: gives them back.
    """

    ping_s: float
    send_s: float
    """Time limit for a client to make progress with reading."""
    stall_s: float
    """The same while an answer waits for the client."""
    message_s: float
    """Time limit for a whole message to arrive."""
    hold: Callable[[int], None]
    release: Callable[[int], None]


class WebSocket(Protocol):
    """One open WebSocket."""

    on_closed: Callable[[], None] | None
    """Called once when no further message can be received or sent."""
    is_behind: Callable[[], bool]
    """Returns whether an answer waits for this client to read."""

    @property
    def reason(self) -> CloseReason | None:
        """None while the WebSocket is open."""

    async def receive(self) -> Message | None:
        """Returns the next message; None after the end, or after :meth:`stop_receiving`."""

    def stop_receiving(self) -> None: ...

    async def send(self, texts: Sequence[bytes]) -> None:
        """Sends text messages as soon as the client has read the earlier ones. Raises the error of the end."""

    def close(self, reason: CloseReason) -> None:
        """Sends a close frame after everything sent before. A no-op after the end."""

    async def ended(self) -> None:
        """Waits until the connection has ended."""
