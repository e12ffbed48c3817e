"""`python -m benchmarks workers`: one worker, two workers, and two gateways, with an engine that answers at once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from benchmarks.compare import CPU, Comparison, Goal, Workload, ratio
from benchmarks.contents import SMALL, json_of
from benchmarks.load.orders import HttpAsk
from benchmarks.servers import Peer, Start, Triton, running_gateway

ASK = HttpAsk("/v1/pipelines/identity", json_of(INPUT=SMALL))
PROGRAM = ("-m", "benchmarks.instant")
ONE, TWO, SIDE_BY_SIDE = "1 worker", "2 workers", "two separate gateways with 1 worker"
WORKLOAD = Workload("Small JSON, 64 connections", "small", 64)
NOTE = (
    "`serve` with sockets, log and metrics, with an engine that answers at once instead of Triton. CPU: of the "
    "gateway's processes, including their parent. Two gateways share nothing, so on two cores their rate is the upper "
    "limit for two workers; other load on the machine affects both equally. With N free cores, N workers reach N "
    "times the rate of one, times the ratio to two gateways."
)
GOALS = (
    Goal("requests/s of 2 workers, against 1 worker", None, None, ratio(WORKLOAD, TWO, ONE)),
    Goal("CPU of 2 workers for a request, against 1 worker", None, None, ratio(WORKLOAD, TWO, ONE, CPU)),
    Goal("requests/s of 2 workers, against two gateways", 0.9, None, ratio(WORKLOAD, TWO, SIDE_BY_SIDE)),
    Goal("CPU of 2 workers for a request, against two gateways", None, None, ratio(WORKLOAD, TWO, SIDE_BY_SIDE, CPU)),
)


gateway = partial(
    running_gateway, asks={"small": ASK}, config="pipelines: {identity: {model: identity}}", program=PROGRAM
)


@asynccontextmanager
async def side_by_side(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    async with gateway("first", triton, folder) as first, gateway("second", triton, folder) as second:
        yield Peer(SIDE_BY_SIDE, (*first.pids, *second.pids), (*first.loads, *second.loads), first.asks)


PEERS: dict[str, Start] = {
    ONE: partial(gateway, ONE),
    TWO: partial(gateway, TWO, workers="2"),
    SIDE_BY_SIDE: side_by_side,
}
run = Comparison(PEERS, (WORKLOAD,), GOALS, note=NOTE, seconds=1.0, warm_up_s=0.3, has_triton=False).run
