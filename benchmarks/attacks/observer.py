"""`python -m benchmarks.attacks.observer URL PID`: watches a gateway in a separate process until its input closes.

Then prints one JSON object: the memory of the process in MiB, before and at its peak, and the milliseconds of each
`GET /health/live`. It sends one request every 10 ms over one connection.
"""

import asyncio
import json
import sys
import time
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

import psutil

from benchmarks.attacks.target import Target, connect
from benchmarks.watching import say, watching

MIB = 1024 * 1024
PAUSE_S = 0.01
REQUEST = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Observation:
    """An observation. Its fields are filled in when it ends."""

    before_mib: float = 0.0
    peak_mib: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """Returns the cells for COLUMNS."""
        latencies = (self.percentile_ms(part) for part in (0.99, 1))
        return [f"{self.before_mib:.0f}", f"{self.peak_mib:.0f}", *(f"{each:.1f}" for each in latencies)]

    def percentile_ms(self, part: float) -> float:
        """Returns a latency. ``part``: 0.5 for the median, 1 for the worst."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


COLUMNS = ["memory before, MiB", "peak, MiB", "/health/live p99, ms", "worst, ms"]


def observed(target: Target) -> AbstractAsyncContextManager[Observation]:
    """Observes the target for the duration of the block."""
    return watching("benchmarks.attacks.observer", Observation(), target.url, target.pid)


async def _observe(url: str, pid: int) -> None:
    before = psutil.Process(pid).memory_info().rss
    memory = asyncio.create_task(_peak(pid))
    reader, writer = await connect(url)
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    latencies = []
    say("ready")
    while not closed.done():
        start = time.perf_counter()
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        latencies.append((time.perf_counter() - start) * 1000)
        await asyncio.sleep(PAUSE_S)
    writer.close()
    memory.cancel()
    peak = await memory
    say(json.dumps({"before_mib": before / MIB, "peak_mib": peak / MIB, "latencies_ms": latencies}))


async def _peak(pid: int) -> int:
    """Records the peak memory in bytes until cancelled, also while there is no answer."""
    gateway, peak = psutil.Process(pid), 0
    with suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, gateway.memory_info().rss)
            await asyncio.sleep(0.002)
    return peak


if __name__ == "__main__":
    asyncio.run(_observe(sys.argv[1], int(sys.argv[2])))
