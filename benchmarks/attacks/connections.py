"""Data after a request, and open connections without a request."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.attacks.observer import COLUMNS, observed
from benchmarks.attacks.target import attacked, connect
from benchmarks.servers import Peer
from benchmarks.table import Table

MIB = 1024 * 1024
PIECE = 256 * 1024
TRAILERS_MIB = 60
SWALLOWED_MIB = 256
FLOOD_S = 40.0
IDLE = 3_000
IDLE_S = 100.0
"""Longer than the keep-alive timeout of 75 s."""
CRLF_EVERY_S = 5.0

GOOD = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
BEFORE = b"POST /v1/streams HTTP/1.1\r\n" + CHUNKED
"""The answer waits for the end of the body."""
AFTER = b"GET /health/live HTTP/1.1\r\n" + CHUNKED
"""The answer does not wait for the end of the body."""
JSON = b"POST /v1/streams HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TOO_LARGE = JSON + b"Content-Length: 4294967296\r\n\r\n"


async def run(_rounds: int) -> Sequence[Table]:
    """Takes about five minutes, whatever ``_rounds``."""
    async with attacked() as target:
        return [await _floods(target), await _idle(target)]


@dataclass(frozen=True)
class _Flood:
    name: str
    url: str
    head: bytes
    piece: bytes
    mib: int


async def _floods(target: Peer) -> Table:
    """Sends each flood until it is complete, the gateway closes the connection, or FLOOD_S has passed."""
    trailers, value = b"a:b\r\n" * (PIECE // 5), b"a" * PIECE
    floods = [
        _Flood("trailers before the answer", target.url, BEFORE, trailers, TRAILERS_MIB),
        _Flood("trailers behind the answer", target.url, AFTER, trailers, TRAILERS_MIB),
        _Flood("trailers, on the admin port", target.admin_url, AFTER, trailers, TRAILERS_MIB),
        _Flood("one trailer's value", target.url, BEFORE + b"a: ", value, TRAILERS_MIB),
        _Flood("one chunk extension", target.url, BEFORE.removesuffix(b"0\r\n") + b"5;", value, TRAILERS_MIB),
        _Flood("a body behind a 413", target.url, TOO_LARGE, value, SWALLOWED_MIB),
    ]
    rows = [await _row(target, flood) for flood in floods]
    note = "MiB taken: accepted by the gateway and the kernel's buffers until the end of the flood or the connection."
    return Table("Floods on one connection", ["flood", "MiB offered", "MiB taken", "s", *COLUMNS], rows, note)


async def _row(target: Peer, flood: _Flood) -> list[str]:
    async with observed(target) as seen:
        start = time.monotonic()
        taken = await _taken(flood)
        seconds = time.monotonic() - start
        await asyncio.sleep(1)
    return [flood.name, str(flood.mib), f"{taken / MIB:.1f}", f"{seconds:.1f}", *seen.cells]


async def _taken(flood: _Flood) -> int:
    """Bytes."""
    reader, writer = await connect(flood.url)
    writer.transport.set_write_buffer_limits(high=0)
    answer = asyncio.create_task(_read_all(reader))
    taken = 0
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(FLOOD_S):
            writer.write(flood.head)
            await asyncio.sleep(0.5)
            while taken < flood.mib * MIB and not writer.is_closing():
                writer.write(flood.piece)
                await writer.drain()
                taken += len(flood.piece)
    answer.cancel()
    writer.transport.abort()
    return taken


async def _read_all(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read()


async def _idle(target: Peer) -> Table:
    """Measures one kind of connection after the other."""
    ways: dict[str, Callable[[asyncio.StreamWriter], Awaitable[None]]] = {
        "a line end every 5 s behind an answer": _send_line_ends,
        "nothing behind an answer": _send_nothing,
    }
    rows = []
    for name, way in ways.items():
        async with observed(target) as seen:
            open_s = await asyncio.gather(*(_open_s(target, way) for _ in range(IDLE)))
        rows.append([name, str(IDLE), str(sum(s >= IDLE_S for s in open_s)), f"{max(open_s):.0f}", *seen.cells])
    columns = ["connections that send", "opened", f"open after {IDLE_S:.0f} s", "longest, s", *COLUMNS]
    return Table("Idle connections", columns, rows)


async def _open_s(target: Peer, way: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> float:
    """Returns the seconds from the answer to the end of the connection."""
    reader, writer = await connect(target.url)
    writer.write(GOOD)
    await reader.readuntil(b"}")
    start = time.monotonic()
    sending = asyncio.ensure_future(way(writer))
    with suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(reader.read(), IDLE_S)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.transport.abort()
    return time.monotonic() - start


async def _send_line_ends(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\r\n")
        await asyncio.sleep(CRLF_EVERY_S)


async def _send_nothing(_writer: asyncio.StreamWriter) -> None:
    return
