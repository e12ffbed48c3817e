"""The numbers of each pipeline that a page can draw, read from the metrics when somebody asks."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from app.core.errors import Outcome
from app.observability.metrics import DURATION_BOUNDS_S

_INDEX_BY_BOUND = {bound: index for index, bound in enumerate([*DURATION_BOUNDS_S, math.inf])}
_ANSWERED = {Outcome.OK, Outcome.EARLY_EXIT}
_COUNT_BY_GAUGE = {
    "in_flight_requests": "in_flight",
    "active_streams": "active_streams",
    "requests_waiting_by_pipeline": "waiting",
}
_PREFIX = "triton_gateway_"


@dataclass(slots=True)
class TransportStatistics:
    """The ended requests of a pipeline, either the unary ones or the streams."""

    outcomes: dict[str, int] = field(default_factory=dict)
    durations: list[int] = field(default_factory=lambda: [0] * len(_INDEX_BY_BOUND))
    """For each of ``DURATION_BOUNDS_S``, how many answered requests took at most that long; at the end, all of them."""


@dataclass(slots=True)
class PipelineStatistics:
    """Counters since the start of the gateway, and gauges of this moment."""

    unary: TransportStatistics = field(default_factory=TransportStatistics)
    stream: TransportStatistics = field(default_factory=TransportStatistics)
    early_exits: dict[str, int] = field(default_factory=dict)
    """By reason."""
    in_flight: int = 0
    active_streams: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Statistics:
    """``time_s``: when they were read, on a clock that all processes of the machine share.

    ``pipelines``: a pipeline without requests may be missing.
    """

    time_s: float
    pipelines: dict[str, PipelineStatistics]


def statistics_of(registry: CollectorRegistry) -> Statistics:
    """``registry``: of one process, or the joined one of several workers."""
    found: dict[str, PipelineStatistics] = {}
    for family in registry.collect():
        for sample in family.samples:
            if (pipeline := sample.labels.get("pipeline")) is not None:
                _add(found.setdefault(pipeline, PipelineStatistics()), sample)
    return Statistics(time.monotonic(), found)


def _add(statistics: PipelineStatistics, sample: Sample) -> None:
    name, labels, value = sample.name.removeprefix(_PREFIX), sample.labels, int(sample.value)
    if name == "requests_total":
        _ended(statistics, labels).outcomes[labels["outcome"]] = value
    elif name == "request_duration_seconds_bucket" and labels["outcome"] in _ANSWERED:
        _ended(statistics, labels).durations[_INDEX_BY_BOUND[float(labels["le"])]] += value
    elif name == "early_exits_total":
        statistics.early_exits[labels["reason"]] = value
    elif name in _COUNT_BY_GAUGE:
        setattr(statistics, _COUNT_BY_GAUGE[name], value)


def _ended(statistics: PipelineStatistics, labels: Mapping[str, str]) -> TransportStatistics:
    return statistics.stream if labels["transport"] == "stream" else statistics.unary
