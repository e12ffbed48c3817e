"""One HTTP request to an ASGI application, as uvicorn hands it over, without a socket."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Scope


class Connection:
    """A client that sent its whole request and stays connected: ``app.api.exchange.Connection``."""

    is_lost = False
    has_whole_request = True
    unsent_bytes = 0

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None

    def abort(self) -> None:
        raise NotImplementedError


class Exchange:
    """The messages of one request and its response."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.answer = b""

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message["body"]


async def post(app: ASGIApp, path: str, body: bytes) -> Exchange:
    """Sends a JSON body and returns the complete exchange."""
    exchange = Exchange(body)
    await app(_scope(path, len(body)), exchange.receive, exchange.send)
    return exchange


def _scope(path: str, length: int) -> Scope:
    headers = [
        (b"host", b"127.0.0.1:8080"),
        (b"user-agent", b"benchmark"),
        (b"accept", b"*/*"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % length),
    ]
    return {
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
        "state": {"connection": Connection()},
    }
