"""One HTTP request to an ASGI application, as uvicorn hands it over, without a socket."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Message

from app.api.exchange import Header
from tests.toolkit.exchange import FakeConnection


class Connection(FakeConnection):
    """A client that sent its whole request and stays connected: ``app.http1.protocol.HttpConnection``."""

    def __init__(self, exchange: "Exchange") -> None:
        super().__init__(exchange.receive)
        self._exchange = exchange

    def take_body(self, max_bytes: int) -> bytes | None:
        return self._exchange.body if len(self._exchange.body) <= max_bytes else None

    def answer(self, status: int, _headers: Sequence[Header], body: bytes) -> bool:
        self._exchange.status, self._exchange.answer = status, body
        return True


class Exchange:
    """The messages of one request and its response."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.status = 0
        self.answer = b""

    async def receive(self) -> Message:
        """Returns the whole body. No application calls this again."""
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message["body"]


async def request(app: ASGIApp, path: str, body: bytes) -> Exchange:
    """Sends a POST with a JSON body, and returns the complete exchange."""
    exchange = Exchange(body)
    headers = [
        (b"host", b"127.0.0.1:8080"),
        (b"user-agent", b"benchmark"),
        (b"accept", b"*/*"),
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/json"),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8080),
        "state": {"connection": Connection(exchange)},
    }
    await app(scope, exchange.receive, exchange.send)
    return exchange
