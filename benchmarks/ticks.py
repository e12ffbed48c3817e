"""`python -m benchmarks.ticks URL PID`: reads a ticking stream in a process of its own, until its input closes.

Then prints one JSON object: the milliseconds between each two reads, and the most memory of the gateway's process.
"""

import asyncio
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.stage import Gateway

BODY = json.dumps({"count": 1_000_000, "interval_ms": 2}).encode()
HEAD = (
    "POST /v1/pipelines/bench_stream/stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
)


@dataclass
class Ticks:
    """What was seen; filled in when the observation ends."""

    gaps_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@asynccontextmanager
async def ticks(gateway: Gateway) -> AsyncIterator[Ticks]:
    """Reads a stream of the gateway, which writes an event every 2 ms, for the duration of the block."""
    found = Ticks()
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.ticks", gateway.url, str(gateway.pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert reader.stdout is not None
    await reader.stdout.readline()
    try:
        yield found
    finally:
        printed, _ = await reader.communicate(b"")
        found.__dict__.update(json.loads(printed))


def memory_of(pid: int, name: str) -> int:
    """``VmRSS`` or ``VmHWM``, the most since ``_forget_peak``. Source: proc_pid_status(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def _forget_peak(pid: int) -> None:
    """Source: proc_pid_clear_refs(5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _main(url: str, pid: int) -> None:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(HEAD.encode() + BODY)
    for _ in range(50):
        connection.recv(65536)
    _forget_peak(pid)
    _say("ready")
    waiting = threading.Thread(target=sys.stdin.read, daemon=True)
    waiting.start()
    reads = []
    while waiting.is_alive():
        connection.recv(65536)
        reads.append(time.perf_counter())
    gaps = [(after - earlier) * 1000 for earlier, after in itertools.pairwise(reads)]
    _say(json.dumps(Ticks(gaps, memory_of(pid, "VmHWM")).__dict__))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
