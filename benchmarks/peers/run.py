"""`python -m benchmarks peers`: measures all servers in front of one Triton."""

import asyncio
import operator
import tempfile
from pathlib import Path

import psutil

from benchmarks.compare import (
    CPU,
    P50,
    RATE,
    Chart,
    Comparison,
    Found,
    Goal,
    Workload,
    own,
    ratio,
    say,
)
from benchmarks.contents import INSIGHTS
from benchmarks.figure import Figure
from benchmarks.load.orders import Drop, Hold
from benchmarks.peers.servers import (
    BARE,
    GATEWAY,
    GATEWAY_V2,
    KSERVE,
    PEERS,
    PLAIN,
    STREAMING,
    TRITON,
)
from benchmarks.servers import Peer, running_triton
from benchmarks.spread import Spread
from benchmarks.table import Table

IDLE_STREAMS, IDLE_WARM_UP, SETTLE_S = 2_000, 50, 2.0

SMALL_1 = Workload("Small JSON (4 floats), 1 connection", "small")
SMALL_32 = Workload("Small JSON (4 floats), 32 connections", "small", 32)
SMALL_256 = Workload("Small JSON (4 floats), 256 connections", "small", 256)
LARGE = Workload("Large JSON (150,528 floats both ways), 1 connection", "large")
FILE = Workload("Image upload (200 KB), 1 connection", "file")
BINARY_1 = Workload("Binary body (1 MiB), 1 connection", "1 MiB")
BINARY_16 = Workload("Binary body (16 MiB), 1 connection", "16 MiB")
EARLY_EXIT = Workload("Early exit of the OCR pipeline (blank image), 1 connection", "early exit")
INSIGHTS_64 = tuple(Workload(f"`{name}`, 64 connections", name, 64) for name in INSIGHTS)
STREAM = Workload("Streams of 5,000 events, 1 at a time", "stream", streams_s=0, unit="event")
STREAM_AWAKE = Workload(
    "Streams of 5,000 events, 1 at a time, processors kept awake", "stream", 1, 0, keeps_awake=True, unit="event"
)
WORKLOADS = (
    *(SMALL_1, SMALL_32, SMALL_256, LARGE, FILE, BINARY_1, BINARY_16, EARLY_EXIT, *INSIGHTS_64, STREAM, STREAM_AWAKE),
)
RATE_OF = "requests/s of"
GOALS = (
    Goal(f"{RATE_OF} small JSON, 32 connections, against plain FastAPI", 2, 2.5, ratio(SMALL_32, GATEWAY, PLAIN)),
    Goal(
        f"{RATE_OF} small JSON, 32 connections, against a bare grpc.aio client", 0.7, 1, ratio(SMALL_32, GATEWAY, BARE)
    ),
    Goal(
        "CPU for a small request, 32 connections, against plain FastAPI",
        0.5,
        0.35,
        ratio(SMALL_32, GATEWAY, PLAIN, CPU),
        lower=True,
    ),
    Goal(
        "p50 added at 1 connection to a direct grpc.aio call",
        0.5,
        0.35,
        ratio(SMALL_1, GATEWAY, BARE, P50, compare=operator.sub),
        "ms",
        lower=True,
    ),
    *(
        Goal(f"{prefix}{RATE_OF} {body}, against Triton's HTTP endpoint", floor, aim, ratio(workload, name, TRITON))
        for prefix, name in (("", GATEWAY), ("/v2, ", GATEWAY_V2))
        for body, floor, aim, workload in (
            ("large JSON", 2.2, 3, LARGE),
            ("a binary body of 1 MiB", 0.9, 1, BINARY_1),
            ("a binary body of 16 MiB", 1.5, 3, BINARY_16),
        )
    ),
    Goal(f"{RATE_OF} small JSON, 32 connections, against KServe", 2.5, 3.5, ratio(SMALL_32, GATEWAY, KSERVE)),
    Goal(f"{RATE_OF} large JSON, against KServe", 10, 15, ratio(LARGE, GATEWAY, KSERVE)),
    *(
        Goal(f"answers/s of {each.title}, against Triton called directly", 0.75, 0.9, ratio(each, GATEWAY, BARE))
        for each in INSIGHTS_64
    ),
    *(
        goal
        for each, kept in ((STREAM, ""), (STREAM_AWAKE, ", processors kept awake"))
        for goal in (
            Goal(f"events/s of a stream, against a bare grpc.aio reader{kept}", 0.85, 0.95, ratio(each, GATEWAY, BARE)),
            Goal(f"CPU for an event of a stream{kept}", 65, 45, own(each, GATEWAY, CPU), "µs", lower=True),
        )
    ),
    Goal(
        "memory of an idle stream",
        24,
        18,
        lambda found: Spread(found.idle_kib[GATEWAY]) if GATEWAY in found.idle_kib else None,
        "KiB",
        lower=True,
    ),
)
SMALL = {"1 connection": SMALL_1, "32 connections": SMALL_32, "256 connections": SMALL_256}
SINGLE = {"large JSON": LARGE, "image upload": FILE}
STREAMED = {"as it is": STREAM, "processors awake": STREAM_AWAKE}
CHARTS = (
    Chart("Small JSON: requests per second", "small-rate.svg", SMALL, RATE),
    Chart("Small JSON: µs of the peer's CPU a request", "small-cpu.svg", SMALL, CPU),
    Chart("One connection: p50, ms", "one-connection.svg", SINGLE, P50),
    Chart("Streams: events per second", "stream-rate.svg", STREAMED, RATE),
)
COMPARISON = Comparison(PEERS, WORKLOADS, GOALS, CHARTS, cpu_elsewhere=(TRITON,))


async def run(rounds: int) -> list[Table | Figure]:
    found = Found()
    for name in STREAMING:
        say(f"idle streams of {name}")
        found.idle_kib[name] = [await _idle_stream_kib(name)]
    await COMPARISON.measure(rounds, found)
    return COMPARISON.results(found)


async def _idle_stream_kib(name: str) -> float:
    """Measures with new processes, because streams in reused memory would seem to cost nothing.

    Uses a separate Triton, because Triton 2.51 may crash when thousands of streams end at once.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, running_triton(Path(folder)) as triton:
        async with PEERS[name](triton, Path(folder)) as peer:
            return await _kib_of(peer)


async def _kib_of(peer: Peer) -> float:
    """Resident memory that each open, silent stream adds to the server's process."""
    ask, server = peer.asks["idle stream"], psutil.Process(peer.pids[0])
    await peer.load.perform(Hold(ask, IDLE_WARM_UP))  # type: ignore[arg-type]
    before = server.memory_info().rss
    await peer.load.perform(Hold(ask, IDLE_STREAMS))  # type: ignore[arg-type]
    await asyncio.sleep(SETTLE_S)
    after = server.memory_info().rss
    await peer.load.perform(Drop())
    return (after - before) / IDLE_STREAMS / 1024
