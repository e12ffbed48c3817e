"""The HTTP side of a stream without Triton: the gateway's response compared with the plain sse-starlette response."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import uvicorn
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.body_memory import ByteBudget
from app.api.exchange import EntryPoint
from app.api.limits import Limits
from app.api.problems import problem_response
from app.api.streaming import Start, StreamResponse
from app.api.workload import Workload
from app.http1.protocol import ConnectionLimit, protocol_with
from app.observability.metrics import Metrics
from app.observability.tracing import NoTracer
from app.streams.events import Event, LiveLog
from benchmarks.stage import free_ports, process
from benchmarks.table import Table
from benchmarks.timing import Call, interleaved

EVENTS = 5_000
IDLE = 1_000
CPU_ROUNDS = 20
DATA = b'{"text":"word ","token_id":[1]}'
PEERS = ("own", "sse-starlette")

Read = Callable[[str], Awaitable[None]]


async def run(rounds: int) -> list[Table]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for peer in PEERS:
            (port,) = free_ports(1)
            command = [sys.executable, "-m", "benchmarks.sse_peers", peer, str(port)]
            with process(command, {}, Path(folder) / f"{peer}.log") as server:
                await _until_up(port)
                calls: dict[str, Call] = {"events": partial(_read, port, "/events", b"event: done")}
                found = await interleaved(calls, max(rounds // 3, 5), warm_up=1)
                cpu_us = await _cpu_us(port, server.pid)
                each_kib = await _idle_kib(port, server.pid)
            per_s = f"{EVENTS / found['events'].median_ms * 1000:,.0f}"
            rows.append([peer, str(found["events"]), per_s, f"{cpu_us:.1f}", f"{each_kib:.1f}"])
    columns = [
        "response",
        f"{EVENTS:,} events, ms",
        "events/s",
        "CPU us an event",
        f"KiB for each of {IDLE:,} idle streams",
    ]
    return [Table("Server-Sent Events over uvicorn", columns, rows)]


async def _read(port: int, path: str, until: bytes) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    tail = b""
    while until not in tail:
        chunk = await reader.read(1 << 18)
        assert chunk, tail
        tail = (tail + chunk)[-300:]
    if path == "/events":
        writer.transport.abort()
    return writer


async def _cpu_us(port: int, pid: int) -> float:
    """CPU time of the server for one event, including its creation."""
    watched = psutil.Process(pid)
    before = watched.cpu_times()
    for _ in range(CPU_ROUNDS):
        await _read(port, "/events", b"event: done")
    after = watched.cpu_times()
    return (after.user + after.system - before.user - before.system) / CPU_ROUNDS / EVENTS * 1e6


async def _idle_kib(port: int, pid: int) -> float:
    watched = psutil.Process(pid)
    before = watched.memory_info().rss
    writers = [await _read(port, "/idle", b"\r\n\r\n") for _ in range(IDLE)]
    await asyncio.sleep(1)
    grown = watched.memory_info().rss - before
    for writer in writers:
        writer.transport.abort()
    return grown / IDLE / 1024


async def _until_up(port: int) -> None:
    for _ in range(200):
        try:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return


def _own(events: int) -> Response:
    """A log that is filled by a task, as in the gateway."""
    log = LiveLog(max_unread_bytes=1 << 30)

    async def fill() -> None:
        for number in range(1, events + 1):
            log.append(Event(number, "output", DATA))
            if number % 16 == 0:
                await asyncio.sleep(0)
        if events:
            log.append(Event(events + 1, "done", b"{}"))

    task = asyncio.create_task(fill())

    async def closing() -> None:
        await task

    return StreamResponse(log, Limits(1), start=Start(preamble=b":\n\n"), on_left=lambda _: None, closing=closing)


def _sse_starlette(events: int) -> Response:
    async def content() -> AsyncIterator[ServerSentEvent]:
        for number in range(1, events + 1):
            yield ServerSentEvent(DATA.decode(), event="output", id=str(number), sep="\n")
            if number % 16 == 0:
                await asyncio.sleep(0)
        if not events:
            await asyncio.sleep(3600)
        yield ServerSentEvent("{}", event="done", id=str(events + 1), sep="\n")

    return EventSourceResponse(content(), ping=15, send_timeout=10)


def serve(arguments: Sequence[str]) -> None:
    """The server process that :func:`run` starts: ``own`` or ``sse-starlette``, and a port."""
    peer, port = arguments
    make = _own if peer == "own" else _sse_starlette

    async def many(_request: Request) -> Response:
        return make(EVENTS)

    async def idle(_request: Request) -> Response:
        return make(0)

    app = Starlette(routes=[Route("/events", many), Route("/idle", idle)])
    uvicorn.run(
        EntryPoint(app, Metrics("0"), Workload(), NoTracer(), ByteBudget(1 << 20)),
        port=int(port),
        http=protocol_with(ConnectionLimit(2 * IDLE, int, problem_response)),
        ws="none",
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    serve(sys.argv[1:])
