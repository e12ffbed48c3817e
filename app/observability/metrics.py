"""The Prometheus metrics, and the numbers of each pipeline that a page can draw from them.

Label values come from fixed sets, never from a caller's text.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.registry import Collector

from app.core.engine import ObservedCall
from app.core.errors import GatewayError, Outcome
from app.core.json import Schema, enum_of
from app.observability.log import dropped_lines

NO_PIPELINE = "-"
PREFIX = "triton_gateway_"

DURATION_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BY_REQUEST = ("pipeline", "transport", "outcome")
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


Mode = Literal["livesum", "livemax", "all"]


class _Of(NamedTuple):
    """What a metric counts. ``name``: its name if the attribute's name differs; for a histogram with ``_seconds``.

    ``mode``: how the gauges of several processes are merged. With ``all``, a page has those of its process.
    """

    text: str
    labels: tuple[str, ...] = ()
    name: str = ""
    buckets: tuple[float, ...] = DURATION_BOUNDS_S
    mode: Mode = "livesum"


_of: Any = _Of
"""Declares a metric of the annotated type."""


_PIPELINE = ("pipeline",)
_MODEL = ("model",)


class Metrics:
    """The metrics of one gateway, in a separate registry."""

    requests: Counter = _of("Requests that ended, by outcome", _BY_REQUEST)
    request_duration: Histogram = _of("Time from a request's first byte to its answer's last byte", _BY_REQUEST)
    overhead: Histogram = _of(
        "Time spent outside Triton and outside the queue", ("pipeline", "transport"), buckets=_OVERHEAD_SECONDS
    )
    time_to_first_output: Histogram = _of("From a stream's request to its first output", _PIPELINE)
    inter_output: Histogram = _of("Between two outputs of a stream", _PIPELINE)
    stream_outputs: Counter = _of("Outputs of streams", _PIPELINE)
    prompt_tokens: Counter = _of("Tokens of the prompts of language models", _PIPELINE)
    completion_tokens: Counter = _of("Tokens that language models wrote", _PIPELINE)
    time_per_output_token: Histogram = _of(
        "From the first to the last output of a stream, for each token after the first", _PIPELINE
    )
    in_flight: Gauge = _of("Unary requests in progress", _PIPELINE, "in_flight_requests")
    active_streams: Gauge = _of("Streams under way", _PIPELINE)
    queue_time: Histogram = _of(
        "Time that a request waited for a slot, 0 if it did not wait", _PIPELINE, "queue_seconds"
    )
    requests_running: Gauge = _of("Requests that have a slot")
    requests_waiting: Gauge = _of("Requests that wait for a slot")
    requests_running_by_pipeline: Gauge = _of("Requests that have a slot", _PIPELINE)
    requests_waiting_by_pipeline: Gauge = _of("Requests that wait for a slot", _PIPELINE)
    in_flight_limit: Gauge = _of("Slots for requests to a model", _MODEL)
    kept_streams: Gauge = _of("Resumable streams that can be read, running and ended")
    kept_stream_bytes: Gauge = _of("Memory of the events of resumable streams")
    open_websockets: Gauge = _of("Open WebSockets", _PIPELINE)
    ended_websockets: Counter = _of("WebSockets that ended, by reason", ("pipeline", "reason"), "websockets")
    request_parts: Counter = _of("Calls for requests with more items than their model takes at a time", _PIPELINE)
    steps: Counter = _of("Steps of pipelines that the gateway runs, by outcome", ("pipeline", "step", "outcome"))
    early_exits: Counter = _of("Requests that ended in an early exit", ("pipeline", "reason"))
    rejected: Counter = _of("Requests rejected under load, by error code", ("reason",))
    contract_violations: Counter = _of("Outputs that broke their contract", ("pipeline", "tensor"))
    model_exceptions: Counter = _of(
        "Requests that failed because a model's script raised, a whole batch at a time", _PIPELINE
    )
    triton_calls: Counter = _of("Inference calls to Triton", ("model", "code"))
    triton_calls_by_address: Counter = _of("Inference calls to each of several Tritons", ("address", "code"))
    triton_ejections: Counter = _of("Times that one of several Tritons was not used any more", ("address", "reason"))
    triton_repeats: Counter = _of("Requests that were sent to Triton again, to another one if there are several")
    open_breakers: Gauge = _of("Tritons where a model is not called until it answers a probe", _MODEL)
    large_calls: Counter = _of("Calls with large tensors, by transport", ("way",))
    shared_memory_bytes: Gauge = _of("Shared memory for large tensors, by its state", ("state",))
    stub_deaths: Counter = _of("Python processes of models that died", _MODEL)
    engine_deaths: Counter = _of("Engines of models that died", _MODEL)
    worker_deaths: Counter = _of("Worker processes that ended unexpectedly")
    out_of_files: Counter = _of("Seconds in which a process had no free file descriptor")
    log_lines_dropped: Counter = _of("Log lines dropped because the reader of the log is too slow")
    model_ready: Gauge = _of("Whether the model of a pipeline is ready", _MODEL, mode="all")
    config_reload_failed: Gauge = _of(
        "Whether the newest gateway.yaml or file of API keys cannot be served in full", mode="livemax"
    )

    def __init__(self, version: str, *, has_addresses: bool = False) -> None:
        """``has_addresses``: whether there may be several Tritons."""
        self.registry = CollectorRegistry()
        for attribute, kind in get_type_hints(Metrics).items():
            if isinstance(of := getattr(Metrics, attribute, None), _Of):
                setattr(self, attribute, self._registered(attribute, kind, of))
        self.has_addresses = has_addresses
        labels = ("address",) if has_addresses else ()
        self.triton_up: Gauge = self._registered("triton_up", Gauge, _Of("Whether Triton answers", labels, mode="all"))
        build = _Of("The running version, as a label", ("version",), mode="all")
        self._registered("build_info", Gauge, build).labels(version).set(1)
        ProcessCollector(registry=self.registry)
        self.of_pipeline: Callable[[str], PipelineMetrics] = cache(partial(PipelineMetrics, self))
        """Returns the same object for the same name."""
        self.calls_of: Callable[..., Counter] = cache(self.triton_calls.labels)
        self.calls_by_address: Callable[..., Counter] = cache(self.triton_calls_by_address.labels)
        self._shown_dropped_lines = 0

    def _registered(self, attribute: str, kind: type, of: _Of) -> Any:
        name = of.name or attribute
        if kind is Counter:
            return self.counter(name, of.text, *of.labels)
        if kind is Histogram:
            return self.histogram(of.name or f"{name}_seconds", of.text, *of.labels, buckets=of.buckets)
        return self.gauge(name, of.text, *of.labels, mode=of.mode)

    def gauge(self, name: str, text: str, *labels: str, mode: Mode = "livesum") -> Gauge:
        """``mode``: of the values of several processes."""
        return Gauge(f"{PREFIX}{name}", text, labels, registry=self.registry, multiprocess_mode=mode)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return _Counter(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = DURATION_BOUNDS_S
    ) -> Histogram:
        return _Histogram(f"{PREFIX}{name}", text, labels, registry=self.registry, buckets=buckets)

    def show_load(
        self,
        in_flight: Mapping[str, int],
        running: Mapping[str, int],
        waiting: Mapping[str, int],
        limits: Mapping[str, int],
    ) -> None:
        """``limits``: by model; the others by pipeline."""
        self.log_lines_dropped.inc((dropped := dropped_lines()) - self._shown_dropped_lines)
        self._shown_dropped_lines = dropped
        self.requests_running.set(sum(running.values()))
        self.requests_waiting.set(sum(waiting.values()))
        by_label = (
            (self.in_flight, in_flight),
            (self.requests_running_by_pipeline, running),
            (self.requests_waiting_by_pipeline, waiting),
            (self.in_flight_limit, limits),
        )
        for gauge, values in by_label:
            for label, value in values.items():
                gauge.labels(label).set(value)

    def show_shared_memory(self, **bytes_by_state: int) -> None:
        for state, size in bytes_by_state.items():
            self.shared_memory_bytes.labels(state).set(size)


class _Counter(Counter):
    """Counts in half of the time of prometheus_client's method, which checks its arguments. Stores no exemplars."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self._value.inc(amount)


class _Histogram(Histogram):
    """Finds the bucket by bisection, in a third of the time of prometheus_client's loop. Stores no exemplars."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


_M = TypeVar("_M", Counter, Gauge, Histogram)


def _series(metric: Callable[[Metrics], _M]) -> "cached_property[_M]":
    """The series of a metric for one pipeline. It is created, and appears on the page, at its first use."""
    return cached_property(lambda pipeline: metric(pipeline.metrics).labels(pipeline.name))


class PipelineMetrics:
    """The series of one pipeline."""

    parts = _series(lambda metrics: metrics.request_parts)
    time_per_output_token = _series(lambda metrics: metrics.time_per_output_token)
    queue_time = _series(lambda metrics: metrics.queue_time)
    active_streams = _series(lambda metrics: metrics.active_streams)
    time_to_first_output = _series(lambda metrics: metrics.time_to_first_output)
    inter_output = _series(lambda metrics: metrics.inter_output)
    stream_outputs = _series(lambda metrics: metrics.stream_outputs)

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.metrics = metrics
        self.name = name
        self.requests = cache(partial(metrics.requests.labels, name))
        self.request_duration = cache(partial(metrics.request_duration.labels, name))
        self.overhead = cache(partial(metrics.overhead.labels, name))


@dataclass(eq=False)
class CountedCall(ObservedCall):
    """Counts a call by model and gRPC code, and by ``address``, which is empty if there is one Triton."""

    metrics: Metrics
    address: str = ""

    def ended(self, code: str, error: GatewayError | None) -> None:
        self.metrics.calls_of(self.request.model, code).inc()
        if self.address:
            self.metrics.calls_by_address(self.address, code).inc()


_INDEX_BY_BOUND = {bound: index for index, bound in enumerate([*DURATION_BOUNDS_S, math.inf])}
_ANSWERED = {Outcome.OK, Outcome.EARLY_EXIT}
_COUNT_BY_GAUGE = {
    "in_flight_requests": "in_flight",
    "active_streams": "active_streams",
    "requests_waiting_by_pipeline": "waiting",
}

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
        name, labels, value = sample.name.removeprefix(PREFIX), sample.labels, int(sample.value)
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
