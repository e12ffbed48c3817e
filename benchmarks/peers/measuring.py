"""One measurement: runs a workload on a peer for some time, and measures the resources of the processes."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass

import psutil

from benchmarks.awake import processors_awake
from benchmarks.load.orders import Drop, Hold, Order, Relay, Unary
from benchmarks.peers.peer import Peer
from benchmarks.peers.workloads import Workload
from benchmarks.timing import Durations, cpu_s

WARM_UP_S = 0.15
IDLE_WARM_UP = 50
SETTLE_S = 2.0


@dataclass(frozen=True)
class Sample:
    """``*_us``: microseconds of CPU for each request or event. Latencies of a stream's events are not measured."""

    rate: float
    p50_ms: float
    p99_ms: float
    peer_us: float
    triton_us: float
    load_us: float
    rss_mib: float


async def measure(peer: Peer, workload: Workload, triton_pid: int, seconds: float) -> Sample:
    """Raises the exceptions of the load process, because an unexpected answer ends the benchmark."""
    with processors_awake() if workload.keeps_awake else nullcontext():
        return await _measured(peer, workload, triton_pid, seconds)


async def _measured(peer: Peer, workload: Workload, triton_pid: int, seconds: float) -> Sample:
    await peer.load.perform(_order(peer, workload, WARM_UP_S))
    servers = [psutil.Process(pid) for pid in (peer.pid, *peer.workers)]
    triton, load = psutil.Process(triton_pid), psutil.Process(peer.load.pid)
    before = sum(map(cpu_s, servers)), _family_cpu_s(triton), cpu_s(load)
    report = await peer.load.perform(_order(peer, workload, seconds))
    after = sum(map(cpu_s, servers)), _family_cpu_s(triton), cpu_s(load)
    used = [1e6 * (end - start) / report.count for start, end in zip(before, after, strict=True)]
    latencies = Durations(report.durations or (0.0,))
    return Sample(
        report.count / report.elapsed_s,
        latencies.percentile_ms(50),
        latencies.percentile_ms(99),
        *used,
        sum(server.memory_info().rss for server in servers) / 2**20,
    )


async def idle_stream_kib(peer: Peer, streams: int) -> float:
    """Resident memory that each open, silent stream adds to the peer's process."""
    ask, server = peer.asks["idle stream"], psutil.Process(peer.pid)
    await peer.load.perform(Hold(ask, IDLE_WARM_UP))
    before = server.memory_info().rss
    await peer.load.perform(Hold(ask, streams))
    await asyncio.sleep(SETTLE_S)
    after = server.memory_info().rss
    await peer.load.perform(Drop())
    return (after - before) / streams / 1024


def _family_cpu_s(process: psutil.Process) -> float:
    """Returns the CPU time of Triton and its model processes."""
    return sum(cpu_s(each) for each in (process, *process.children(recursive=True)))


def _order(peer: Peer, workload: Workload, seconds: float) -> Order:
    ask = peer.asks[workload.ask]
    return Relay(ask, seconds) if workload.is_stream else Unary(ask, workload.connections, seconds)
