"""A request without a server: an exchange with a connection that the test can close."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.exchange import ByteBudget, Exchange, Header
from app.http1.framing import BodySink


class FakeConnection:
    """Implements :class:`app.http1.protocol.HttpConnection`."""

    unsent_bytes = 0

    def __init__(self, receive: Receive | None = None) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self.is_aborted = False
        self.receive = receive or nothing
        self.loop = SimpleNamespace(call_soon=lambda work, *arguments: work(*arguments))

    def lose(self) -> None:
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def abort(self) -> None:
        self.is_aborted = True

    def end_after_answer(self) -> None:
        pass

    def take_body(self, _max_bytes: int) -> None:
        return None

    async def receive_body(self, sink: BodySink) -> bool:
        """Passes the messages that the test sends."""
        while (message := await self.receive())["type"] != "http.disconnect":
            sink.add(message.get("body", b""))
            if not message.get("more_body", False):
                return True
        return False

    def answer(self, _status: int, _headers: Sequence[Header], _body: bytes) -> bool:
        return False


def connected(app: ASGIApp) -> ASGIApp:
    """Adds a connection to each request, as the server does."""

    async def with_connection(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"connection": FakeConnection(receive)}
        await app(scope, receive, send)

    return with_connection


async def nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def drop(_message: Message) -> None:
    pass


def exchange_with(
    headers: Sequence[tuple[str, str]] = (),
    *,
    budget: ByteBudget | None = None,
    connection: FakeConnection | None = None,
    receive: Receive = nothing,
    send: Send = drop,
) -> Exchange:
    """Must be called in a task. Like :class:`app.api.endpoint.Application`, it stores the exchange in the scope."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        "state": {"connection": connection or FakeConnection()},
    }
    scope["state"]["connection"].receive = receive
    exchange = Exchange(scope, send, budget or ByteBudget(1024))
    scope["state"]["exchange"] = exchange
    return exchange
