"""The numbers of each pipeline that a page can draw, read from the metrics when somebody asks."""

import math
import time
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from prometheus_client.registry import Collector

from app.core.errors import Outcome
from app.core.json import Schema, enum_of
from app.observability.metrics import DURATION_BOUNDS_S

_INDEX_BY_BOUND = {bound: index for index, bound in enumerate([*DURATION_BOUNDS_S, math.inf])}
_ANSWERED = {Outcome.OK, Outcome.EARLY_EXIT}
_COUNT_BY_GAUGE = {
    "in_flight_requests": "in_flight",
    "active_streams": "active_streams",
    "requests_waiting_by_pipeline": "waiting",
}
_PREFIX = "triton_gateway_"


_Count = Annotated[int, Meta(ge=0)]
_Outcomes: Schema = {"propertyNames": enum_of(map(str, Outcome))}


class TransportStatistics(Struct):
    """The ended requests of a pipeline, either the unary ones or the streams."""

    outcomes: Annotated[dict[str, _Count], Meta(description="Ended requests by outcome", extra_json_schema=_Outcomes)]
    durations: Annotated[
        list[_Count],
        Meta(
            description="How many answered requests (`ok` and `early_exit`) took at most each of `bounds_s`; then all"
        ),
    ]


class PipelineStatistics(Struct):
    """Counters since the start of the gateway, and gauges of this moment."""

    unary: TransportStatistics
    stream: TransportStatistics
    early_exits: Annotated[dict[str, _Count], Meta(description="Early exits by reason")]
    in_flight: Annotated[int, Meta(ge=0, description="Unary requests in progress")] = 0
    active_streams: _Count = 0
    waiting: Annotated[int, Meta(ge=0, description="Requests that wait for a slot")] = 0


class Statistics(Struct):
    """The numbers of each pipeline."""

    # all processes of the machine share the clock
    time_s: Annotated[float, Meta(description="Only the difference of two answers has a meaning")]
    bounds_s: Annotated[Sequence[float], Meta(description="The upper bounds of `durations`, in seconds")]
    pipelines: dict[str, PipelineStatistics]


def statistics_of(metrics: Collector) -> Statistics:
    """``metrics``: of all processes. A pipeline without requests may be missing."""
    found: dict[str, PipelineStatistics] = {}
    for sample in (each for family in metrics.collect() for each in family.samples if "pipeline" in each.labels):
        name, labels, value = sample.name.removeprefix(_PREFIX), sample.labels, int(sample.value)
        statistics = found.setdefault(labels["pipeline"], no_requests())
        ended = statistics.stream if labels.get("transport") == "stream" else statistics.unary
        if name == "requests_total":
            ended.outcomes[labels["outcome"]] = value
        elif name == "request_duration_seconds_bucket" and labels["outcome"] in _ANSWERED:
            ended.durations[_INDEX_BY_BOUND[float(labels["le"])]] += value
        elif name == "early_exits_total":
            statistics.early_exits[labels["reason"]] = value
        elif name in _COUNT_BY_GAUGE:
            setattr(statistics, _COUNT_BY_GAUGE[name], value)
    return Statistics(time.monotonic(), DURATION_BOUNDS_S, found)


def no_requests() -> PipelineStatistics:
    unary, stream = (TransportStatistics({}, [0] * len(_INDEX_BY_BOUND)) for _ in range(2))
    return PipelineStatistics(unary, stream, {})
