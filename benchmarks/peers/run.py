"""`python -m benchmarks peers`: all peers before one Triton, in turns."""

import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.peers import gateway, grpc_client, kserve_transformer, plain_fastapi, triton_http
from benchmarks.peers.found import Found
from benchmarks.peers.measuring import idle_stream_kib, measure
from benchmarks.peers.peer import Peer, Start
from benchmarks.peers.reach import reach_table
from benchmarks.peers.tables import idle_table, workload_table
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.stage import Triton, running_triton
from benchmarks.table import Table

PEERS: Mapping[str, Start] = {
    module.NAME: module.start for module in (gateway, plain_fastapi, kserve_transformer, triton_http, grpc_client)
}
STREAMING = (gateway.NAME, plain_fastapi.NAME, grpc_client.NAME)
"""The peers whose idle streams are measured."""
SECONDS = 0.8
IDLE_STREAMS = 2_000


async def run(rounds: int) -> list[Table]:
    found = Found()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with running_triton(Path(folder)) as triton:
            await _measure_idle(triton, Path(folder), found)
            await _measure_rounds(triton, Path(folder), rounds, found)
    return [reach_table(found), *(workload_table(each, found) for each in WORKLOADS), idle_table(found)]


async def _measure_idle(triton: Triton, folder: Path, found: Found) -> None:
    """On fresh processes: in memory that a process has freed before, streams would seem to cost nothing."""
    for name in STREAMING:
        async with PEERS[name](triton, folder) as peer:
            found.idle_kib[name] = [await idle_stream_kib(peer, IDLE_STREAMS)]


async def _measure_rounds(triton: Triton, folder: Path, rounds: int, found: Found) -> None:
    """Every workload of every peer once a round, in a shuffled order."""
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(start(triton, folder)) for start in PEERS.values()]
        for _ in range(rounds):
            await _measure_round(peers, triton.pid, found)


async def _measure_round(peers: Sequence[Peer], triton_pid: int, found: Found) -> None:
    for workload in random.sample(WORKLOADS, len(WORKLOADS)):
        for peer in random.sample(peers, len(peers)):
            if workload.ask in peer.asks:
                found.add(workload, peer.name, await measure(peer, workload, triton_pid, SECONDS))
