"""The guarantees of a transport, tested with both gRPC clients."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.grpc.client import Client
from app.grpc.rpc import LATER_S, STATUSES, RpcError, StreamCall, Transport
from app.triton.cancellation import PacedCancels
from app.triton.connect import MAX_MESSAGE_BYTES, SLOW_PINGS
from app.triton.grpcio import GrpcioStreamCall, GrpcioTransport
from tests.toolkit.environments import short_path

Answer = Callable[[bytes, grpc.aio.ServicerContext], AsyncIterator[bytes]]
Open = Callable[[str], Transport]
WAIT_S = 20.0
LARGE = bytes(20_000)
"""Larger than the prefetch limit."""
FLOOD = [b"%d" % number + LARGE for number in range(100)]
ROUNDED_UP_S = 0.1
"""Source: grpcio rounds a timeout of 10 to 100 s up to steps of 100 ms."""


class Script(grpc.GenericRpcHandler):
    """A server with a unary and a streaming method, which the test provides."""

    def __init__(self) -> None:
        self.answer: Answer = sending()
        self.metadata: dict[str, str] = {}
        self.ended = asyncio.Event()
        """Set when an answer ends or the call is cancelled."""

    def answer_when_released(self) -> asyncio.Event:
        """Repeats each message after the event is set."""
        released = asyncio.Event()

        async def answer(message: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            await released.wait()
            yield message

        self.answer = answer
        return released

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        if details.method == "/test/Unary":
            return grpc.unary_unary_rpc_method_handler(self._unary)
        return grpc.stream_stream_rpc_method_handler(self._stream) if details.method == "/test/Stream" else None

    async def _unary(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async for answer in self._answered(message, context):
            return answer
        return b""

    async def _stream(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for message in messages:
            async for answer in self._answered(message, context):
                yield answer

    async def _answered(self, message: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        self.metadata = dict(context.invocation_metadata() or ())
        try:
            async for answer in self.answer(message, context):
                yield answer
        finally:
            self.ended.set()


def sending(*messages: bytes, pause_s: float = 0.0, then_s: float = 0.0) -> Answer:
    """Answers with these messages, or repeats the request. ``pause_s``: before the last one; ``then_s``: after it."""

    async def answer(message: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        *before, last = messages or (message,)
        for each in before:
            yield each
        await asyncio.sleep(pause_s)
        yield last
        await asyncio.sleep(then_s)

    return answer


@asynccontextmanager
async def serving(
    script: Script, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    sizes = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
    server = grpc.aio.server(options=[*sizes, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((script,))
    add = (
        server.add_insecure_port
        if credentials is None
        else partial(server.add_secure_port, server_credentials=credentials)
    )
    port = add(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def by_asyncio(url: str) -> Transport:
    return Client(url, SLOW_PINGS, MAX_MESSAGE_BYTES)


def by_grpcio(url: str) -> Transport:
    return GrpcioTransport(url, SLOW_PINGS, MAX_MESSAGE_BYTES)


@pytest.fixture(params=[by_asyncio, by_grpcio], ids=["asyncio", "grpcio"])
def open_transport(request: pytest.FixtureRequest) -> Open:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def script() -> Script:
    return Script()


@pytest.fixture
async def transport(open_transport: Open, script: Script) -> AsyncIterator[Transport]:
    async with serving(script) as url:
        opened = open_transport(url)
        yield opened
        await opened.close()


async def called(transport: Transport, message: bytes = b"x", timeout_s: float = WAIT_S) -> bytes:
    return await (await transport.unary("/test/Unary", message, timeout_s)).response()


async def streamed(transport: Transport, message: bytes = b"x", timeout_s: float = WAIT_S) -> StreamCall:
    return await transport.stream("/test/Stream", message, timeout_s)


async def error_of(work: Awaitable[Any]) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await work
    return caught.value


async def drained(stream: StreamCall) -> list[bytes]:
    return [message async for message in stream]


async def test_metadata_and_deadline_reach_the_server(transport: Transport, script: Script) -> None:
    remaining = []

    async def answer(message: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        remaining.append(context.time_remaining())
        yield message

    script.answer = answer
    call = await transport.unary(
        "/test/Unary", b"", 7.0, (("traceparent", "00-a-b-01"), ("tracestate", "k=" + "v" * 300))
    )
    await call.response()
    assert script.metadata["traceparent"] == "00-a-b-01"
    assert script.metadata["tracestate"] == "k=" + "v" * 300
    assert LATER_S < remaining[0] <= LATER_S + 7.0 + ROUNDED_UP_S


async def test_a_deadline_that_passes_while_a_stream_starts_is_reported(transport: Transport, script: Script) -> None:
    """Blocks the event loop, so that deadlines pass between the steps of a start."""
    script.answer_when_released()

    async def stream(timeout_s: float) -> list[bytes]:
        return await drained(await streamed(transport, b"x" * 100, timeout_s))

    async def block() -> None:
        for _ in range(200):
            time.sleep(0.003)  # noqa: ASYNC251 - blocks the event loop
            await asyncio.sleep(0)

    calls = (stream(each % 40 / 2000) for each in range(200))
    *ends, _ = await asyncio.gather(*calls, block(), return_exceptions=True)
    assert {end.code if isinstance(end, RpcError) else repr(end) for end in ends} == {"DEADLINE_EXCEEDED"}


@pytest.mark.parametrize("code", STATUSES[1:])
async def test_every_status_code_with_its_details(transport: Transport, script: Script, code: str) -> None:
    details = "no boxes: 100 % of 'ä', \n[0] 日本"

    async def answer(_message: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode[code], details)
        yield b""

    script.answer = answer
    error = await error_of(called(transport))
    assert (error.code, error.details, error.was_sent) == (code, details, True)


async def test_a_response_over_the_limit_is_an_error(transport: Transport, script: Script) -> None:
    script.answer = sending(bytes(MAX_MESSAGE_BYTES + 1))
    assert (await error_of(called(transport))).code == "RESOURCE_EXHAUSTED"
    script.answer = sending()
    assert await called(transport, b"next") == b"next"


async def test_a_stream_keeps_its_order(transport: Transport, script: Script) -> None:
    sent = [b"%d" % n for n in range(1000)] + [b"", bytes(3 * 1024 * 1024), b"last"]

    script.answer = sending(*sent)
    stream = await streamed(transport)
    assert await drained(stream) == sent
    assert stream.done()
    assert stream.arrived is not None
    assert stream.gap_s is not None


async def test_a_stalled_reader_stops_the_server(transport: Transport, script: Script) -> None:
    sent = 0

    async def answer(_message: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1500):
            yield bytes(16 * 1024)
            sent += 1

    script.answer = answer
    stream = await streamed(transport)
    await anext(stream)
    settled = -1
    while settled != sent:
        settled = sent
        await asyncio.sleep(0.3)
    assert sent < 1000, "flow control did not stop the server"
    assert len(await drained(stream)) == 1499


async def test_cancelling_a_wait_for_a_stream_loses_no_message(transport: Transport, script: Script) -> None:
    script.answer = sending(*FLOOD)
    stream, seen = await streamed(transport), []
    for _ in FLOOD:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        if not waiting.cancel():
            seen.append(waiting.result())
    assert seen + await drained(stream) == FLOOD


async def test_a_stalled_reader_is_behind_until_it_waits_again(transport: Transport, script: Script) -> None:
    script.answer = sending(*FLOOD, b"last", pause_s=0.3)
    stream = await streamed(transport)
    await anext(stream)
    assert not stream.is_behind
    await asyncio.sleep(0.2)
    await anext(stream)
    await asyncio.sleep(0)
    assert stream.is_behind
    assert (await drained(stream))[-1] == b"last"
    assert not stream.is_behind


async def test_a_reader_within_the_prefetch_limit_is_not_behind(transport: Transport, script: Script) -> None:
    script.answer = sending(*[b"%d" % n for n in range(10)])
    stream = await streamed(transport)
    async for _ in stream:
        assert not stream.is_behind
        await asyncio.sleep(0.02)


async def test_after_a_large_response_the_next_may_have_begun(transport: Transport, script: Script) -> None:
    """The gateway's own client sees the beginning of a response; grpcio shows only whole responses."""
    script.answer = sending(LARGE, b"small", pause_s=1.3)
    stream = await streamed(transport)
    await anext(stream)
    assert stream.is_receiving == isinstance(stream, GrpcioStreamCall)
    await asyncio.sleep(1.1)
    assert not stream.is_receiving
    await anext(stream)


async def test_a_cancelled_stream_leaves_no_task(transport: Transport, script: Script) -> None:
    script.answer, before = sending(*FLOOD), asyncio.all_tasks()
    stream = await streamed(transport)
    await anext(stream)
    await PacedCancels().end_stream(stream, "m", time.monotonic(), 0.0)
    assert stream.done()
    async with asyncio.timeout(WAIT_S):
        while any("grpcio" in str(task.get_coro()) for task in asyncio.all_tasks() - before):
            await asyncio.sleep(0.01)


async def test_a_closed_transport_ends_an_abandoned_stream(transport: Transport, script: Script) -> None:
    script.answer_when_released()
    stream = await streamed(transport)
    cancelling = asyncio.create_task(PacedCancels().end_stream(stream, "m", time.monotonic(), 0.0, 60.0))
    await asyncio.sleep(0.05)
    await transport.close()
    await asyncio.wait_for(cancelling, WAIT_S)


async def test_cancelling_a_stream_does_not_affect_others(transport: Transport, script: Script) -> None:
    async def answer(message: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield message
        await asyncio.sleep(3600 if message == b"long" else 0.2)

    script.answer = answer
    stream, other = await streamed(transport, b"long"), await streamed(transport, b"short")
    assert await anext(stream) == b"long"
    script.ended.clear()
    stream.cancel()
    assert stream.done()
    stream.close()
    await asyncio.wait_for(script.ended.wait(), WAIT_S)
    assert await drained(other) == [b"short"]


async def test_cancelling_the_wait_does_not_cancel_the_response(transport: Transport, script: Script) -> None:
    released = script.answer_when_released()
    call = await transport.unary("/test/Unary", b"later", WAIT_S)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await call.response()
    assert not call.done()
    released.set()
    assert await call.response() == b"later"


async def test_the_deadline_ends_the_wait_and_the_caller_cancels(transport: Transport, script: Script) -> None:
    script.answer_when_released()
    cancelled = script.ended
    unary = await transport.unary("/test/Unary", b"", 0.1)
    assert (await error_of(unary.response())).code == "DEADLINE_EXCEEDED"
    stream = await streamed(transport, timeout_s=0.1)
    assert (await error_of(anext(stream))).code == "DEADLINE_EXCEEDED"
    for call in (unary, stream):
        assert not call.done()
        assert not cancelled.is_set()
        call.cancel()
        assert await asyncio.wait_for(cancelled.wait(), WAIT_S)
        cancelled.clear()


async def test_a_missing_server_is_unavailable(open_transport: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"127.0.0.1:{taken.getsockname()[1]}"
    transport = open_transport(url)
    error = await error_of(called(transport))
    assert (error.code, error.was_sent) == ("UNAVAILABLE", False)
    await transport.close()


@pytest.mark.parametrize("closes", [False, True], ids=["the server stops", "the transport is closed"])
async def test_a_lost_connection_fails_its_calls(open_transport: Open, script: Script, *, closes: bool) -> None:
    """The client cannot know whether the server processed the calls."""
    script.answer = sending(then_s=3600)
    async with serving(script) as url:
        transport = open_transport(url)
        stream = await streamed(transport)
        assert await anext(stream) == b"x"
        if closes:
            await transport.close()
    error = await error_of(anext(stream))
    assert error.code in {"UNAVAILABLE", "CANCELLED"}
    assert error.was_sent
    await transport.close()


async def test_a_transport_reconnects_after_a_restart(open_transport: Open, script: Script, tmp_path: Path) -> None:
    with short_path(tmp_path) as folder:
        address = f"unix:{folder}/triton.sock"
        transport = open_transport(address)
        for _ in range(2):
            async with serving(script, address), asyncio.timeout(WAIT_S):
                answers = list[bytes]()
                while not answers:
                    with suppress(RpcError):
                        answers.append(await called(transport, b"again"))
                    await asyncio.sleep(0.02)
            assert answers == [b"again"]
        await transport.close()
