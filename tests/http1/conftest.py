"""An application that answers with the request that it received. These tests run on uvloop, like the gateway."""

import asyncio
import json
import weakref
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from app.core.errors import PayloadTooLarge
from tests.toolkit.listener import listening

HELLO = b"hello"
LIMIT = 64
"""Of a body that is taken at once."""


class Sink:
    """Implements :class:`app.http1.framing.BodySink`."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._room = bytearray()

    def add(self, part: bytes) -> None:
        if b"!" in part:
            raise PayloadTooLarge("That is too much.")
        self.content += part

    def room(self, size: int) -> memoryview:
        self._room = bytearray(size)
        return memoryview(self._room)

    def filled(self, size: int) -> None:
        self.add(self._room[:size])


class Application:
    """The path selects the behaviour; the tests set ``go_on``, the application sets ``disconnected``."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.calls = 0
        self.connection: Any = None
        """The connection of the last request."""
        self.last_sink: weakref.ref[Sink] | None = None
        self.taken: list[bytes | None] = []
        self.were_direct: list[bool] = []
        self.after_answer: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        self.connection = scope["state"]["connection"]
        await getattr(self, scope["path"].strip("/"))(scope, receive, send)

    async def early(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Answers without reading the body."""
        await _answer(send, HELLO)

    async def read(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers with the headers and the body."""
        body = await self._body(receive)
        if body is None:
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        await _answer(send, json.dumps({"headers": headers, "body": body.decode()}).encode())

    async def _body(self, receive: Any) -> bytes | None:
        """Returns the whole body, or None after a disconnect."""
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return None
            body, more = body + message["body"], message["more_body"]
        return body

    async def asgi(self, _scope: Any, receive: Any, send: Any) -> None:
        """Answers with the body."""
        await _answer(send, await self._body(receive) or b"")

    async def direct(self, _scope: Any, receive: Any, send: Any) -> None:
        """Like ``asgi``, but without the messages of ASGI where that is possible."""
        self.taken.append(self.connection.take_body(LIMIT))
        body = await self._body(receive) if self.taken[-1] is None else self.taken[-1]
        await self._answer_directly(send, body or b"")
        self.after_answer.append((await receive())["type"])

    async def large_direct(self, _scope: Any, _receive: Any, send: Any) -> None:
        await self._answer_directly(send, bytes(8 << 20))

    async def lost_direct(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Answers after the client has disconnected."""
        while not self.connection.is_lost:
            await asyncio.sleep(0.01)
        await self._answer_directly(send, HELLO)

    async def _answer_directly(self, send: Any, body: bytes) -> None:
        self.were_direct.append(self.connection.answer(200, [(b"content-length", b"%d" % len(body))], body))
        if not self.were_direct[-1]:
            await _answer(send, body)

    async def sink(self, _scope: Any, receive: Any, send: Any) -> None:
        """Answers with the length and the checksum of the body. Rejects a body with an exclamation mark."""
        body = Sink()
        self.last_sink = weakref.ref(body)
        try:
            is_complete = await self.connection.receive_body(body)
        except PayloadTooLarge as exc:
            await _answer(send, exc.detail.encode())
            return
        if not is_complete:
            assert (await receive())["type"] == "http.disconnect"
            self.disconnected.set()
            return
        await _answer(send, b"%d %d" % (len(body.content), zlib.crc32(body.content)))

    async def wait(self, _scope: Any, receive: Any, _send: Any) -> None:
        """Waits for the disconnect."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def stream(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Sends the second half of a chunked answer after the test sets ``go_on``."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async def later(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Answers after the test sets ``go_on``."""
        await asyncio.wait_for(self.go_on.wait(), 5)
        await _answer(send, HELLO)

    async def later_stream(self, scope: Any, receive: Any, send: Any) -> None:
        """Like ``stream``, but begins after the test sets ``go_on`` for the first time."""
        await asyncio.wait_for(self.go_on.wait(), 5)
        self.go_on.clear()
        await self.stream(scope, receive, send)

    async def large(self, _scope: Any, _receive: Any, send: Any) -> None:
        await _answer(send, bytes(32 << 20))


async def _answer(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def application() -> Application:
    return Application()


@pytest.fixture
async def port(application: Application) -> AsyncIterator[int]:
    async with listening(application) as port:
        yield port
