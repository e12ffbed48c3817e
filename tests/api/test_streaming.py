"""The response that sends the events of a stream, compared with sse-starlette."""

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import orjson
import pytest
from httpx_sse._decoders import SSEDecoder
from hypothesis import given
from hypothesis import strategies as st
from sse_starlette import ServerSentEvent
from sse_starlette.sse import AppStatus

from app.api.bodies import Limits
from app.api.streaming import PING, RETRY, StreamResponse, frame_of
from app.core.errors import GatewayError
from app.streams.events import Event, EventName, LiveLog
from tests.toolkit.exchange import FakeConnection, exchange_with, nothing

HOSTILE = b'{"event":"done","id":9,"retry":1,"data":"\\r\\n\\n","comment":"x"}'


class Client:
    """The server's side of one ASGI response; the client reads everything or nothing."""

    def __init__(self, *, reads: bool = True, unsent_bytes: int = 0) -> None:
        self.connection = FakeConnection()
        self.connection.unsent_bytes = unsent_bytes if reads else 1
        self.sent: list[dict[str, Any]] = []
        self.reads = reads
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.left: list[GatewayError] = []

    async def send(self, message: Any) -> None:
        if not self.reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        await self.may_send.wait()
        self.sent.append(message)

    async def ask(self, log: LiveLog, limits: Limits) -> None:
        async def closing() -> None:
            pass

        response = StreamResponse(log, limits, on_left=self.left.append, closing=closing)
        exchange = exchange_with([("x", "y")], connection=self.connection)
        await response(exchange.scope, nothing, self.send)
        assert exchange.header(b"x") is None
        assert exchange.scope["headers"] == []

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_keys_of_model_output_never_become_fields() -> None:
    decoder = SSEDecoder()
    events = [decoder.decode(line) for line in frame_of(Event(1, "output", HOSTILE)).decode().splitlines()]
    (event,) = [each for each in events if each is not None]
    assert (event.id, event.event, event.data.encode(), event.retry) == ("1", "output", HOSTILE, None)


def test_frames_follow_the_standard() -> None:
    assert frame_of(Event(7, "done", b"{}")) == b"id: 7\nevent: done\ndata: {}\n\n"
    assert PING == b": \n\n"
    assert RETRY == b"retry: 1000\n\n"


@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each))
)
def test_a_frame_equals_the_encoding_of_sse_starlette(values: Any) -> None:
    data = orjson.dumps(values)
    for name in get_args(EventName):
        encoded = ServerSentEvent(data.decode(), event=name, id="12", sep="\n").encode()
        assert frame_of(Event(12, name, data)) == encoded


def test_a_signal_does_not_end_streams_through_sse_starlette() -> None:
    assert not AppStatus.enable_automatic_graceful_drain


async def test_all_available_events_are_sent_at_once() -> None:
    log, client = LiveLog(), Client()
    for event in (Event(1, "output", b"{}"), Event(2, "output", b"{}"), Event(3, "done", b"{}")):
        log.append(event)
    await client.ask(log, Limits(1, ping_s=0.05))
    assert [message["more_body"] for message in client.sent[1:]] == [True, True, False]
    frames = [frame_of(Event(number, name, b"{}")) for number, name in ((1, "output"), (2, "output"), (3, "done"))]
    assert client.body == PING + b"".join(frames)
    assert b"connection" not in dict(client.sent[0]["headers"])


async def test_a_slow_client_is_reported_and_then_aborted() -> None:
    log, client = LiveLog(), Client(reads=False)
    log.append(Event(1, "output", b"{}"))
    await client.ask(log, Limits(1, send_s=0.02))
    assert [error.code for error in client.left] == ["slow_consumer", "client_closed_request"]
    assert client.connection.is_aborted


async def test_each_event_restarts_the_ping_timer() -> None:
    log, client = LiveLog(), Client(unsent_bytes=0)
    asking = asyncio.create_task(client.ask(log, Limits(1, ping_s=0.2)))
    for number in range(1, 6):
        await asyncio.sleep(0.05)
        log.append(Event(number, "output", b"{}"))
    await until(lambda: client.body.count(PING) == 2)
    log.append(Event(6, "done", b"{}"))
    await asking
    frames = [frame_of(Event(number, "output", b"{}")) for number in range(1, 6)]
    assert client.body == PING + b"".join(frames) + PING + frame_of(Event(6, "done", b"{}"))
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("unsent_bytes", [0, 1])
async def test_no_ping_is_due_while_an_event_is_being_sent(unsent_bytes: int) -> None:
    log, client = LiveLog(), Client(unsent_bytes=unsent_bytes)
    asking = asyncio.create_task(client.ask(log, Limits(1, ping_s=0.05)))
    await until(lambda: client.body.count(PING) == 2)
    client.may_send.clear()
    log.append(Event(1, "output", b"{}"))
    await asyncio.sleep(0.15)
    log.append(Event(2, "done", b"{}"))
    client.may_send.set()
    await asking
    assert client.body.count(PING) == 2
    assert client.body.endswith(frame_of(Event(1, "output", b"{}")) + frame_of(Event(2, "done", b"{}")))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
