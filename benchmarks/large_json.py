"""The effect of a large JSON body on other requests: how long events of a stream wait, and how much memory it needs."""

import asyncio
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import numpy as np

from benchmarks.peers.contents import json_of
from benchmarks.stage import Gateway, stage
from benchmarks.table import Table
from benchmarks.ticks import Ticks, memory_of, ticks
from benchmarks.timing import Durations

MIB = 1024 * 1024
AIMS_MS = {8: (20, 10), 32: (50, 30)}
"""Size of the body in MiB -> the longest allowed wait and the aim."""
SETTLE_S = 0.5
QUIET_S = 3
SETTINGS = {"GATEWAY_MAX_BODY_BYTES": str(64 * MIB), "GATEWAY_MAX_BYTES_IN_FLIGHT": str(256 * MIB)}
SHARED = {"GATEWAY_SHARED_MEMORY_BYTES": str(256 * MIB)}
COLUMNS = [
    "body",
    "answered in",
    "an event waits",
    "at most (aim)",
    "without the body",
    "memory, times the body",
    "kept",
]
NOTE = (
    "The model returns its input, so the answer has as many floats as the body. Meanwhile another stream sends an "
    "event every 2 ms. The wait is the longest time between two events of a round, minus the usual "
    "time. Memory of the gateway's process: the peak during all requests, and the rest three seconds after them."
)


@dataclass
class _Found:
    """The results, with one entry for each round."""

    answered_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    idle_waits_s: list[float] = field(default_factory=list)
    peaks_bytes: list[int] = field(default_factory=list)


async def run(rounds: int) -> list[Table]:
    """Measures a gateway with one worker that sends tensors over gRPC, and one that uses shared memory."""
    return [
        await _table("Tensors over gRPC", SETTINGS, rounds),
        await _table("Tensors through shared memory", {**SETTINGS, **SHARED}, rounds),
    ]


async def _table(title: str, settings: Mapping[str, str], rounds: int) -> Table:
    async with stage(settings) as on:
        rows = [await _row(on.gateway, size_mib, rounds) for size_mib in AIMS_MS]
    return Table(title, COLUMNS, rows, NOTE)


async def _row(gateway: Gateway, size_mib: int, rounds: int) -> list[str]:
    body, found, before = _body_of(size_mib), _Found(), memory_of(gateway.pid, "VmRSS")
    for _ in range(rounds):
        await _round(gateway, body, found)
    await asyncio.sleep(QUIET_S)
    kept = memory_of(gateway.pid, "VmRSS") - before
    highest, aim = AIMS_MS[size_mib]
    times = (found.answered_s, found.waits_s, found.idle_waits_s)
    answered, waits, idle_waits = (str(Durations(tuple(each))) for each in times)
    memory = f"{(max(found.peaks_bytes) - before) / len(body):.1f}"
    return [f"{size_mib} MiB", answered, waits, f"{highest} ({aim})", idle_waits, memory, f"{kept / MIB:.0f} MiB"]


async def _round(gateway: Gateway, body: bytes, found: _Found) -> None:
    calm = await _ticks_beside(gateway, partial(time.sleep, SETTLE_S))
    usual_ms = statistics.median(calm.gaps_ms)
    seen = await _ticks_beside(gateway, lambda: found.answered_s.append(_post(gateway.url, body)))
    found.idle_waits_s.append((max(calm.gaps_ms) - usual_ms) / 1000)
    found.waits_s.append((max(seen.gaps_ms) - usual_ms) / 1000)
    found.peaks_bytes.append(seen.peak_bytes)
    await asyncio.sleep(SETTLE_S)


async def _ticks_beside(gateway: Gateway, work: Callable[[], object]) -> Ticks:
    async with ticks(gateway) as seen:
        await asyncio.to_thread(work)
    return seen


def _body_of(size_mib: int) -> bytes:
    """Returns a JSON body of the size."""
    some = np.random.default_rng(7).standard_normal(100_000, np.float32)
    count = round(size_mib * MIB / (len(json_of(input=some)) / len(some)))
    return json_of(input=np.resize(some, count))


def _post(url: str, body: bytes) -> float:
    """Returns the seconds from the first byte of the request to the last byte of the answer."""
    address, start = urlsplit(url), time.perf_counter()
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = "POST /v1/pipelines/bench_identity HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        status = connection.recv(65536)
        assert status.startswith(b"HTTP/1.1 200"), status[:200]
        while connection.recv(1 << 20):
            pass
    return time.perf_counter() - start
