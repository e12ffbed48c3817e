"""`python -m benchmarks.ticks URL PID`: reads a stream in a separate process until standard input closes.

Then prints one JSON object: the milliseconds between reads, and the peak memory of the gateway's process.
"""

import itertools
import json
import socket
import sys
import threading
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.stage import Gateway
from benchmarks.watching import say, watching

BODY = json.dumps({"count": 1_000_000, "interval_ms": 2}).encode()
HEAD = (
    "POST /v1/pipelines/bench_stream/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
)


@dataclass
class Ticks:
    """An observation. Its fields are filled in when it ends."""

    gaps_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def ticks(gateway: Gateway) -> AbstractAsyncContextManager[Ticks]:
    """Reads a stream of the gateway, which writes an event every 2 ms, for the duration of the block."""
    return watching("benchmarks.ticks", Ticks(), gateway.url, gateway.pid)


def memory_of(pid: int, name: str) -> int:
    """Returns ``VmRSS``, or ``VmHWM``, the peak since ``forget_peak``. Source: proc_pid_status(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def forget_peak(pid: int) -> None:
    """Source: proc_pid_clear_refs(5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _main(url: str, pid: int) -> None:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(HEAD.encode() + BODY)
    for _ in range(50):
        connection.recv(65536)
    forget_peak(pid)
    say("ready")
    waiting = threading.Thread(target=sys.stdin.read, daemon=True)
    waiting.start()
    reads = []
    while waiting.is_alive():
        connection.recv(65536)
        reads.append(time.perf_counter())
    gaps = [(after - earlier) * 1000 for earlier, after in itertools.pairwise(reads)]
    say(json.dumps(Ticks(gaps, memory_of(pid, "VmHWM")).__dict__))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
