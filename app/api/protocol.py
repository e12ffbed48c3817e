"""uvicorn's HTTP protocol with the limits it lacks: headers that are too large, and requests that never end their head.

No middleware could do this: nothing is handed to the application before the head is complete.
"""

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api.problems import MEDIA_TYPE, problem_response
from app.domain.errors import GatewayError, HeadersTooLarge, InvalidRequest, SlowRequest

MAX_HEAD_BYTES = 16 * 1024
HEAD_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 16 * 1024
"""What the transport keeps of an answer before its writer has to wait; the kernel has megabytes of its own."""


class BoundedProtocol(HttpToolsProtocol):
    """Also puts ``abort`` into each request's state: the way to drop a client that no longer reads."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()
        self.scope["state"]["abort"] = self.transport.abort

    def on_headers_complete(self) -> None:
        """Raises where the head is too large: the parser then hands over nothing more of the request."""
        self._head_arrived()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            raise ValueError("head too large")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read is answered like every other error."""
        self._refuse(InvalidRequest("The request is not valid HTTP."))

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse(SlowRequest(f"The headers did not arrive within {HEAD_TIMEOUT_S:g} s."))
        else:
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answers from here, since no application was reached, and closes the connection."""
        self._head_arrived()
        if self.transport.is_closing():
            return
        request_id = uuid.uuid4().hex
        response = problem_response(error, request_id)
        head = (
            f"HTTP/1.1 {response.status_code} {error.title}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(response.body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + bytes(response.body))
        self.transport.close()


def _head_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"The request's line and headers are larger than {MAX_HEAD_BYTES} bytes.")
