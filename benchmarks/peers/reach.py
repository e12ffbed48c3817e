"""The goals of this gateway: a minimum ("at least") and an aim. Each row is one function."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers.found import Figure, Found, Spread
from benchmarks.peers.gateway import NAME as GATEWAY
from benchmarks.peers.gateway_v2 import NAME as GATEWAY_V2
from benchmarks.peers.grpc_client import NAME as BARE
from benchmarks.peers.kserve_transformer import NAME as KSERVE
from benchmarks.peers.plain_fastapi import NAME as PLAIN
from benchmarks.peers.triton_http import NAME as TRITON
from benchmarks.peers.workloads import (
    BINARY_1,
    BINARY_16,
    INSIGHTS_64,
    LARGE,
    SMALL_1,
    SMALL_32,
    STREAM,
    STREAM_AWAKE,
    Workload,
)
from benchmarks.table import Table

Value = Callable[[Found], Spread | None]

RATE: Figure = operator.attrgetter("rate")
CPU: Figure = operator.attrgetter("peer_us")
P50: Figure = operator.attrgetter("p50_ms")
COLUMNS = ["", "found", "at least", "aim", ""]


@dataclass(frozen=True)
class Goal:
    """``value`` returns None if the run has no figures for it. If ``floor`` is above ``aim``, lower is better."""

    title: str
    floor: float
    aim: float
    value: Value
    unit: str = ""


def _compared(
    workload: Workload, peer: str, figure: Figure, compare: Callable[[float, float], float], own: str = GATEWAY
) -> Value:
    def value(found: Found) -> Spread | None:
        if not found.has(workload, own, peer):
            return None
        return found.compared(workload, (own, peer), figure, compare)

    return value


def rate(workload: Workload, peer: str) -> Value:
    return _compared(workload, peer, RATE, operator.truediv)


def v2_rate(workload: Workload, peer: str) -> Value:
    return _compared(workload, peer, RATE, operator.truediv, GATEWAY_V2)


def cpu(workload: Workload, peer: str) -> Value:
    return _compared(workload, peer, CPU, operator.truediv)


def added_p50(workload: Workload, peer: str) -> Value:
    return _compared(workload, peer, P50, operator.sub)


def own_cpu(workload: Workload) -> Value:
    return lambda found: found.spread(workload, GATEWAY, CPU) if found.has(workload, GATEWAY) else None


def idle_kib(found: Found) -> Spread | None:
    return Spread(tuple(found.idle_kib[GATEWAY])) if GATEWAY in found.idle_kib else None


GOALS = (
    Goal("requests/s of small JSON, 32 connections, against plain FastAPI", 2, 2.5, rate(SMALL_32, PLAIN)),
    Goal("requests/s of small JSON, 32 connections, against a bare grpc.aio client", 0.7, 1, rate(SMALL_32, BARE)),
    Goal("CPU for a small request, 32 connections, against plain FastAPI", 0.5, 0.35, cpu(SMALL_32, PLAIN)),
    Goal("p50 added at 1 connection to a direct grpc.aio call", 0.5, 0.35, added_p50(SMALL_1, BARE), "ms"),
    Goal("requests/s of large JSON, against Triton's HTTP endpoint", 2.2, 3, rate(LARGE, TRITON)),
    Goal("requests/s of a binary body of 1 MiB, against Triton's HTTP endpoint", 0.9, 1, rate(BINARY_1, TRITON)),
    Goal("requests/s of a binary body of 16 MiB, against Triton's HTTP endpoint", 1.5, 3, rate(BINARY_16, TRITON)),
    Goal("/v2, requests/s of large JSON, against Triton's HTTP endpoint", 2.2, 3, v2_rate(LARGE, TRITON)),
    Goal("/v2, requests/s of a 1 MiB binary tensor, against Triton's HTTP endpoint", 0.9, 1, v2_rate(BINARY_1, TRITON)),
    Goal(
        "/v2, requests/s of a 16 MiB binary tensor, against Triton's HTTP endpoint", 1.5, 3, v2_rate(BINARY_16, TRITON)
    ),
    Goal("requests/s of small JSON, 32 connections, against KServe", 2.5, 3.5, rate(SMALL_32, KSERVE)),
    Goal("requests/s of large JSON, against KServe", 10, 15, rate(LARGE, KSERVE)),
    *(
        Goal(f"answers/s of {each.title}, against Triton called directly", 0.75, 0.9, rate(each, BARE))
        for each in INSIGHTS_64
    ),
    Goal("events/s of a stream, against a bare grpc.aio reader", 0.85, 0.95, rate(STREAM, BARE)),
    Goal("CPU for an event of a stream", 65, 45, own_cpu(STREAM), "µs"),
    Goal(
        "events/s of a stream, against a bare grpc.aio reader, processors kept awake",
        0.85,
        0.95,
        rate(STREAM_AWAKE, BARE),
    ),
    Goal("CPU for an event of a stream, processors kept awake", 65, 45, own_cpu(STREAM_AWAKE), "µs"),
    Goal("memory of an idle stream", 24, 18, idle_kib, "KiB"),
)


def reach_table(found: Found) -> Table:
    rows = [_row(goal, value) for goal in GOALS if (value := goal.value(found)) is not None]
    note = "Ratios are computed within each round: median (10th to 90th percentile)."
    return Table("What this gateway reaches", COLUMNS, rows, note)


def _row(goal: Goal, found: Spread) -> list[str]:
    times = "" if goal.unit else "x"
    unit = f" {goal.unit}" if goal.unit else ""
    cells = [f"{found.text(2)}{times}{unit}", *(f"{each:g}{times}{unit}" for each in (goal.floor, goal.aim))]
    return [goal.title, *cells, _verdict(goal, found.median)]


def _verdict(goal: Goal, value: float) -> str:
    is_better = operator.ge if goal.aim > goal.floor else operator.le
    if is_better(value, goal.aim):
        return "aim reached"
    return "reached" if is_better(value, goal.floor) else "**missed**"
