"""Checks the request that opens a WebSocket: its headers (RFC 6455, section 4.2.1), and the page that sends it."""

from collections.abc import Collection, Sequence

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader, InvalidUpgrade, NegotiationError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from app.api.exchange import Exchange, Header
from app.core.errors import Forbidden, InvalidRequest, UpgradeRequired

SUBPROTOCOL = Subprotocol("triton-gateway")
_HANDSHAKE = (b"upgrade", b"connection", b"origin")
_HANDSHAKE_FAMILY = b"sec-websocket-"


class _Protocol(ServerProtocol):
    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        """Raises NegotiationError: a browser fails if none of the protocols that it offers is selected."""
        if subprotocols and SUBPROTOCOL not in subprotocols:
            raise NegotiationError
        return SUBPROTOCOL if subprotocols else None

    def recv_frame(self, frame: Frame) -> None:
        """Accepts a close frame between the fragments of a message, too (RFC 6455, 5.4)."""
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


def handshake(exchange: Exchange, max_bytes: int) -> tuple[ServerProtocol, list[Header]]:
    """Accepts a request. Returns the state of the new WebSocket, and the headers of the answer.

    ``max_bytes``: limit of a message. Raises UpgradeRequired or InvalidRequest.
    """
    scope, received = exchange.scope, Headers()
    if scope["method"] != "GET" or scope["http_version"] != "1.1":
        raise _upgrade_required()
    for name, value in scope["headers"]:
        if name in _HANDSHAKE or name.startswith(_HANDSHAKE_FAMILY):
            received[name.decode("latin-1")] = value.decode("latin-1")
    # Without extensions: a compressed message could be 1,000 times larger than the limit of its frames.
    protocol = _Protocol(state=OPEN, max_size=max_bytes)
    response = protocol.accept(Request(scope["path"], received))
    error = protocol.handshake_exc
    if error is None:
        return protocol, [(name.lower().encode(), value.encode()) for name, value in response.headers.raw_items()]
    protocol.parser.close()  # its frame refers to the protocol
    if isinstance(error, InvalidUpgrade):
        raise _upgrade_required() from error
    hint = f"Offer the subprotocol '{SUBPROTOCOL}', or none."
    if isinstance(error, InvalidHeader):
        if error.name == "Sec-WebSocket-Version":  # RFC 6455, 4.4: the answer names the version
            text = "The gateway speaks version 13 of the WebSocket protocol."
            raise UpgradeRequired(text, hint="Use this version.") from error
        hint = f"Check the header {error.name}."
    raise InvalidRequest("The WebSocket handshake is not valid.", hint=hint) from error


def _upgrade_required() -> UpgradeRequired:
    return UpgradeRequired("This address is a WebSocket.", hint="Open it with a WebSocket client, over HTTP/1.1.")


def check_origin(exchange: Exchange, allowed: Collection[str]) -> None:
    """Raises Forbidden for a page of another site that CORS does not allow.

    A browser opens a WebSocket to any address, and sends the page's origin. Requests without an origin pass.
    """
    origin = exchange.header(b"origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if origin.partition("://")[2].lower() != (exchange.header(b"host") or "").lower():
        raise Forbidden(
            "Pages of this origin may not open a WebSocket.", hint="Add the page's origin to GATEWAY_CORS_ORIGINS."
        )
