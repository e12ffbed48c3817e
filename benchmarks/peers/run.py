"""`python -m benchmarks peers`: all peers before one Triton, in turns."""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.peers.every import PEERS, STREAMING
from benchmarks.peers.figures import figures_of
from benchmarks.peers.found import Found
from benchmarks.peers.measuring import idle_stream_kib, measure
from benchmarks.peers.peer import Peer
from benchmarks.peers.reach import reach_table
from benchmarks.peers.tables import idle_table, workload_table
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.stage import Triton, running_triton
from benchmarks.table import Table

SECONDS = 0.7
IDLE_STREAMS = 2_000


async def run(rounds: int) -> list[Table | Figure]:
    found = Found()
    with _folder() as folder:
        async with running_triton(folder) as triton:
            await _measure_idle(triton, found)
            await _measure_rounds(triton, rounds, found)
    tables = [workload_table(each, found) for each in WORKLOADS]
    return [reach_table(found), *figures_of(found), *tables, idle_table(found)]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        yield Path(folder)


async def _measure_idle(triton: Triton, found: Found) -> None:
    """On fresh processes: in memory that a process has freed before, streams would seem to cost nothing."""
    for name in STREAMING:
        _say(f"idle streams of {name}")
        with _folder() as folder:
            async with PEERS[name](triton, folder) as peer:
                found.idle_kib[name] = [await idle_stream_kib(peer, IDLE_STREAMS)]


async def _measure_rounds(triton: Triton, rounds: int, found: Found) -> None:
    """Every workload of every peer once a round, in a shuffled order."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder())
        peers = [await stack.enter_async_context(start(triton, folder)) for start in PEERS.values()]
        for number in range(1, rounds + 1):
            _say(f"round {number} of {rounds}")
            await _measure_round(peers, triton.pid, found)


async def _measure_round(peers: Sequence[Peer], triton_pid: int, found: Found) -> None:
    for workload in random.sample(WORKLOADS, len(WORKLOADS)):
        for peer in random.sample(peers, len(peers)):
            if workload.ask in peer.asks:
                with _named(peer, workload):
                    found.add(workload, peer.name, await measure(peer, workload, triton_pid, SECONDS))


@contextmanager
def _named(peer: Peer, workload: Workload) -> Iterator[None]:
    """Adds to an error what was measured."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"{peer.name}: {workload.title}")
        raise


def _say(text: str) -> None:
    """Shows the progress on standard error."""
    sys.stderr.write(f"peers: {text}\n")
    sys.stderr.flush()
