"""`python -m benchmarks.attacks.observer URL PID`: watches a gateway in a separate process until its input closes.

Then prints one JSON object: the memory of the process in MiB, before and at its peak, and the milliseconds of each
`GET /health/live`. It sends one request every 10 ms over one connection.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psutil

from benchmarks.attacks.target import connect
from benchmarks.servers import MIB, Peer
from benchmarks.spread import percentile

PAUSE_S = 0.01
REQUEST = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
COLUMNS = ["memory before, MiB", "peak, MiB", "/health/live p99, ms", "worst, ms"]


@dataclass
class Observation:
    """An observation. Its fields are filled in when it ends."""

    before_mib: float = 0.0
    peak_mib: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """Returns the cells for COLUMNS."""
        latencies = (percentile(self.latencies_ms, percent) for percent in (99, 100))
        return [f"{self.before_mib:.0f}", f"{self.peak_mib:.0f}", *(f"{each:.1f}" for each in latencies)]


@asynccontextmanager
async def observed(target: Peer) -> AsyncIterator[Observation]:
    """Observes the target for the duration of the block."""
    found = Observation()
    observer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, target.url, str(target.pids[0])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert observer.stdout is not None
    await observer.stdout.readline()
    try:
        yield found
    finally:
        printed, _ = await observer.communicate(b"")
        found.__dict__.update(json.loads(printed))


async def _observe(url: str, pid: int) -> None:
    before = psutil.Process(pid).memory_info().rss
    memory = asyncio.create_task(_peak(pid))
    reader, writer = await connect(url)
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    latencies = []
    _print("ready")
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
    _print(json.dumps({"before_mib": before / MIB, "peak_mib": peak / MIB, "latencies_ms": latencies}))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


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
