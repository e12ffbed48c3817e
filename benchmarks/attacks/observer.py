"""`python -m benchmarks.attacks.observer URL PID`: watches a gateway, in a process of its own, until its input closes.

Then prints one JSON object: the memory of the process in MiB, before and at its peak, and the milliseconds that
`GET /health/live` took, one request every 10 ms, each on the same connection.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil

from benchmarks.attacks.target import Target, connect

MIB = 1024 * 1024
PAUSE_S = 0.01
REQUEST = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Observation:
    """What was seen; filled in when the observation ends."""

    before_mib: float = 0.0
    peak_mib: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """For COLUMNS."""
        ordered = sorted(self.latencies_ms)
        p99 = ordered[int(len(ordered) * 0.99)]
        return [f"{self.before_mib:.0f}", f"{self.peak_mib:.0f}", f"{p99:.1f}", f"{ordered[-1]:.1f}"]


COLUMNS = ["memory before, MiB", "peak, MiB", "/health/live p99, ms", "worst, ms"]


@asynccontextmanager
async def observed(target: Target) -> AsyncIterator[Observation]:
    """Observes the target for the duration of the block."""
    observation = Observation()
    observer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.attacks.observer", target.url, str(target.pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert observer.stdout is not None
    await observer.stdout.readline()
    try:
        yield observation
    finally:
        printed, _ = await observer.communicate(b"")
        observation.__dict__.update(json.loads(printed))


async def _observe(url: str, pid: int) -> None:
    gateway = psutil.Process(pid)
    before = peak = gateway.memory_info().rss
    reader, writer = await connect(url)
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    latencies = []
    _say("ready")
    while not closed.done():
        start = time.perf_counter()
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        latencies.append((time.perf_counter() - start) * 1000)
        peak = max(peak, gateway.memory_info().rss)
        await asyncio.sleep(PAUSE_S)
    writer.close()
    _say(json.dumps({"before_mib": before / MIB, "peak_mib": peak / MIB, "latencies_ms": latencies}))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_observe(sys.argv[1], int(sys.argv[2])))
