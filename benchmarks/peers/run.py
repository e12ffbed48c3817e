"""`python -m benchmarks peers`: measures all peers in front of one Triton, interleaved."""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.load.orders import UnexpectedAnswer
from benchmarks.peers.every import PEERS, STREAMING
from benchmarks.peers.figures import figures_of
from benchmarks.peers.found import Found
from benchmarks.peers.measuring import Sample, idle_stream_kib, measure
from benchmarks.peers.peer import Peer
from benchmarks.peers.reach import reach_table
from benchmarks.peers.tables import idle_table, repeated_tables, workload_table
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.stage import running_triton
from benchmarks.table import Table

SECONDS = 0.7
IDLE_STREAMS = 2_000


async def run(rounds: int) -> list[Table | Figure]:
    found = Found()
    await _measure_idle(found)
    await _measure_rounds(rounds, found)
    tables = [workload_table(each, found) for each in WORKLOADS]
    return [reach_table(found), *figures_of(found), *tables, idle_table(found), *repeated_tables(found)]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        yield Path(folder)


async def _measure_idle(found: Found) -> None:
    """Measures idle streams with new processes, because streams in reused memory would seem to cost nothing.

    Uses a separate Triton, because Triton 2.51 may crash when thousands of streams end at once.
    """
    for name in STREAMING:
        _say(f"idle streams of {name}")
        with _folder() as folder:
            async with running_triton(folder) as triton, PEERS[name](triton, folder) as peer:
                found.idle_kib[name] = [await idle_stream_kib(peer, IDLE_STREAMS)]


async def _measure_rounds(rounds: int, found: Found) -> None:
    """Runs every workload of every peer once per round, in a random order."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder())
        triton = await stack.enter_async_context(running_triton(folder))
        peers = [await stack.enter_async_context(start(triton, folder)) for start in PEERS.values()]
        for number in range(1, rounds + 1):
            _say(f"round {number} of {rounds}")
            await _measure_round(peers, triton.pid, found)


async def _measure_round(peers: Sequence[Peer], triton_pid: int, found: Found) -> None:
    for workload in random.sample(WORKLOADS, len(WORKLOADS)):
        for peer in random.sample(peers, len(peers)):
            if workload.ask in peer.asks:
                found.add(workload, peer.name, await _sample(peer, workload, triton_pid, found))


async def _sample(peer: Peer, workload: Workload, triton_pid: int, found: Found) -> Sample:
    """Repeats a failed measurement once, because on a busy machine Triton may not answer for half a minute."""
    try:
        return await measure(peer, workload, triton_pid, SECONDS)
    except (UnexpectedAnswer, TimeoutError) as exc:
        found.repeated.append((workload.title, peer.name, f"{type(exc).__name__} {exc}"[:200].splitlines()[0]))
        _say(f"again: {found.repeated[-1]}")
        return await measure(peer, workload, triton_pid, SECONDS)


def _say(text: str) -> None:
    """Shows the progress on standard error."""
    sys.stderr.write(f"peers: {text}\n")
    sys.stderr.flush()
