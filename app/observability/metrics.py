"""The Prometheus metrics. Label values come from fixed sets, never from a caller's text."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from app.core.answer import Tokens
from app.core.engine import ObservedCall
from app.core.errors import GatewayError, Outcome, TooManyRequests
from app.core.inference import InferenceRequest
from app.observability.log import dropped_lines

NO_PIPELINE = "-"

DURATION_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BY_REQUEST = ("pipeline", "transport", "outcome")
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class Metrics:
    """The metrics of one gateway, in a separate registry."""

    def __init__(self, version: str, *, has_addresses: bool = False) -> None:
        """``has_addresses``: whether there may be several Tritons."""
        self.registry = CollectorRegistry()
        self.of_pipeline: Callable[[str], PipelineMetrics] = cache(partial(PipelineMetrics, self))
        """Returns the same object for the same name."""
        self.requests = self.counter("requests", "Requests that ended, by outcome", *_BY_REQUEST)
        self.request_duration = self.histogram(
            "request_duration_seconds", "Time from a request's first byte to its answer's last byte", *_BY_REQUEST
        )
        self.overhead = self.histogram(
            "overhead_seconds",
            "Time spent outside Triton and outside the queue",
            "pipeline",
            "transport",
            buckets=_OVERHEAD_SECONDS,
        )
        self.time_to_first_output = self.histogram(
            "time_to_first_output_seconds", "From a stream's request to its first output", "pipeline"
        )
        self.inter_output = self.histogram("inter_output_seconds", "Between two outputs of a stream", "pipeline")
        self.stream_outputs = self.counter("stream_outputs", "Outputs of streams", "pipeline")
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of the prompts of language models", "pipeline")
        self.completion_tokens = self.counter("completion_tokens", "Tokens that language models wrote", "pipeline")
        self.time_per_output_token = self.histogram(
            "time_per_output_token_seconds",
            "From the first to the last output of a stream, for each token after the first",
            "pipeline",
        )
        self.in_flight = self._gauge("in_flight_requests", "Unary requests in progress", "pipeline")
        self.active_streams = self._gauge("active_streams", "Streams under way", "pipeline")
        self.queue_time = self.histogram(
            "queue_seconds", "Time that a request waited for a slot, 0 if it did not wait", "pipeline"
        )
        self.requests_running = self._gauge("requests_running", "Requests that have a slot")
        self.requests_waiting = self._gauge("requests_waiting", "Requests that wait for a slot")
        self.running_by_pipeline = self._gauge("requests_running_by_pipeline", "Requests that have a slot", "pipeline")
        self.waiting_by_pipeline = self._gauge(
            "requests_waiting_by_pipeline", "Requests that wait for a slot", "pipeline"
        )
        self.in_flight_limit = self._gauge("in_flight_limit", "Slots for requests to a model", "model")
        self.kept_streams = self._gauge("kept_streams", "Resumable streams that can be read, running and ended")
        self.kept_stream_bytes = self._gauge("kept_stream_bytes", "Memory of the events of resumable streams")
        self.sessions = OpenedMetrics(
            self._gauge("open_sessions", "Sessions that take steps", "pipeline"),
            self.counter("sessions", "Sessions that ended, by reason", "pipeline", "reason"),
        )
        self.websockets = OpenedMetrics(
            self._gauge("open_websockets", "Open WebSockets", "pipeline"),
            self.counter("websockets", "WebSockets that ended, by reason", "pipeline", "reason"),
        )
        self.parts = self.counter(
            "request_parts", "Calls for requests with more items than their model takes at a time", "pipeline"
        )
        self.early_exits = self.counter("early_exits", "Requests that ended in an early exit", "pipeline", "reason")
        self.rejected = self.counter("rejected", "Requests rejected under load, by error code", "reason")
        self.contract_violations = self.counter(
            "contract_violations", "Outputs that broke their contract", "pipeline", "tensor"
        )
        self.model_exceptions = self.counter(
            "model_exceptions",
            "Requests that failed because a model's script raised, a whole batch at a time",
            "pipeline",
        )
        self.triton_calls = self.counter("triton_calls", "Inference calls to Triton", "model", "code")
        self.triton_calls_by_address = self.counter(
            "triton_calls_by_address", "Inference calls to each of several Tritons", "address", "code"
        )
        self.triton_ejections = self.counter(
            "triton_ejections", "Times that one of several Tritons was not used any more", "address", "reason"
        )
        self.triton_repeats = self.counter(
            "triton_repeats", "Requests that were sent to Triton again, to another one if there are several"
        )
        self.open_breakers = self._gauge(
            "open_breakers", "Tritons where a model is not called until it answers a probe", "model"
        )
        self.large_calls = self.counter("large_calls", "Calls with large tensors, by transport", "way")
        self.shared_memory = self._gauge(
            "shared_memory_bytes", "Shared memory for large tensors, by its state", "state"
        )
        self.stub_deaths = self.counter("stub_deaths", "Python processes of models that died", "model")
        self.engine_deaths = self.counter("engine_deaths", "Engines of models that died", "model")
        self.worker_deaths = self.counter("worker_deaths", "Worker processes that ended unexpectedly")
        self.out_of_files = self.counter("out_of_files", "Seconds in which a process had no free file descriptor")
        self.dropped_lines = self.counter(
            "log_lines_dropped", "Log lines dropped because the reader of the log is too slow"
        )
        self._shown_dropped_lines = 0
        ProcessCollector(registry=self.registry)
        self.has_addresses = has_addresses
        self.triton_up = self._gauge(
            "triton_up", "Whether Triton answers", *(["address"] if has_addresses else []), mode="all"
        )
        self.model_ready = self._gauge("model_ready", "Whether the model of a pipeline is ready", "model", mode="all")
        self.config_reload_failed = self._gauge(
            "config_reload_failed",
            "Whether the newest gateway.yaml or file of API keys cannot be served in full",
            mode="livemax",
        )
        self._gauge("build_info", "The running version, as a label", "version", mode="all").labels(version).set(1)

    @cached_property
    def _calls_of(self) -> Callable[..., Counter]:
        return cache(self.triton_calls.labels)

    def count_triton_call(self, model: str, code: str) -> None:
        self._calls_of(model, code).inc()

    def count_open_breakers(self, model: str, change: int) -> None:
        self.open_breakers.labels(model).inc(change)

    def count_stub_death(self, model: str) -> None:
        self.stub_deaths.labels(model).inc()

    def count_engine_death(self, model: str) -> None:
        self.engine_deaths.labels(model).inc()

    def show_load(
        self,
        in_flight: Mapping[str, int],
        running: Mapping[str, int],
        waiting: Mapping[str, int],
        limits: Mapping[str, int],
    ) -> None:
        """``limits``: by model; the others by pipeline."""
        self.dropped_lines.inc((dropped := dropped_lines()) - self._shown_dropped_lines)
        self._shown_dropped_lines = dropped
        self.requests_running.set(sum(running.values()))
        self.requests_waiting.set(sum(waiting.values()))
        by_label = (
            (self.in_flight, in_flight),
            (self.running_by_pipeline, running),
            (self.waiting_by_pipeline, waiting),
            (self.in_flight_limit, limits),
        )
        for gauge, values in by_label:
            for label, value in values.items():
                gauge.labels(label).set(value)

    def show_kept(self, streams: int, size: int) -> None:
        """``size``: in bytes."""
        self.kept_streams.set(streams)
        self.kept_stream_bytes.set(size)

    def count_refused_connection(self) -> None:
        self.rejected.labels(TooManyRequests.code).inc()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return _Counter(f"triton_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(
        self, name: str, text: str, *labels: str, mode: Literal["livesum", "livemax", "all"] = "livesum"
    ) -> Gauge:
        """``mode``: how the gauges of several processes are merged. With ``all``, a page has those of its process."""
        return Gauge(f"triton_gateway_{name}", text, labels, registry=self.registry, multiprocess_mode=mode)

    def histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = DURATION_BOUNDS_S
    ) -> Histogram:
        return _Histogram(f"triton_gateway_{name}", text, labels, registry=self.registry, buckets=buckets)


class _Counter(Counter):
    """Counts in half of the time of prometheus_client's method, which checks its arguments. Stores no exemplars."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self._value.inc(amount)


class _Histogram(Histogram):
    """Finds the bucket by bisection, in a third of the time of prometheus_client's loop. Stores no exemplars."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


class PipelineMetrics:
    """The series of one pipeline. A series is created, and appears on the page, at its first use."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self._requests = cache(partial(metrics.requests.labels, name))
        self._request_duration = cache(partial(metrics.request_duration.labels, name))
        self._overhead = cache(partial(metrics.overhead.labels, name))

    def count_request(self, transport: str, outcome: Outcome, duration_s: float, elsewhere_s: float) -> None:
        """``elsewhere_s``: in the queue and in Triton."""
        self._requests(transport, outcome).inc()
        self._request_duration(transport, outcome).observe(duration_s)
        self._overhead(transport).observe(max(duration_s - elsewhere_s, 0.0))

    def count_tokens(self, tokens: Tokens) -> None:
        self._metrics.prompt_tokens.labels(self._name).inc(tokens.prompt or 0)
        self._metrics.completion_tokens.labels(self._name).inc(tokens.completion)

    @cached_property
    def parts(self) -> Counter:
        return self._metrics.parts.labels(self._name)

    @cached_property
    def time_per_output_token(self) -> Histogram:
        return self._metrics.time_per_output_token.labels(self._name)

    @cached_property
    def queue_time(self) -> Histogram:
        return self._metrics.queue_time.labels(self._name)

    @cached_property
    def active_streams(self) -> Gauge:
        return self._metrics.active_streams.labels(self._name)

    @cached_property
    def time_to_first_output(self) -> Histogram:
        return self._metrics.time_to_first_output.labels(self._name)

    @cached_property
    def inter_output(self) -> Histogram:
        return self._metrics.inter_output.labels(self._name)

    @cached_property
    def stream_outputs(self) -> Counter:
        return self._metrics.stream_outputs.labels(self._name)


class SharedMemoryMetrics:
    """Observes the shared memory for large tensors."""

    def __init__(self, metrics: Metrics) -> None:
        self._calls_of = cache(metrics.large_calls.labels)
        self._bytes_of = cache(metrics.shared_memory.labels)

    def called(self, way: str) -> None:
        self._calls_of(way).inc()

    def holds(self, *, free: int, used: int, quarantined: int) -> None:
        self._bytes_of("free").set(free)
        self._bytes_of("used").set(used)
        self._bytes_of("quarantined").set(quarantined)


class OpenedMetrics:
    """Counts what the callers of pipelines open and end: sessions or WebSockets."""

    def __init__(self, are_open: Gauge, ended: Counter) -> None:
        self._open_of = cache(are_open.labels)
        self._ended_of = cache(ended.labels)

    def opened(self, pipeline: str) -> None:
        self._open_of(pipeline).inc()

    def ended(self, pipeline: str, reason: str) -> None:
        self._open_of(pipeline).dec()
        self._ended_of(pipeline, reason).inc()


class CallMetrics:
    """Observes calls; counts each call by model and gRPC code, and by address where there are several."""

    def __init__(self, metrics: Metrics, address: str = "") -> None:
        self._metrics = metrics
        self._address = address
        self._calls_of = cache(partial(metrics.triton_calls_by_address.labels, address))

    def started(self, request: InferenceRequest, method: str) -> ObservedCall:
        return _CountedCall(request, self._metrics, self._calls_of if self._address else None)


class _CountedCall(ObservedCall):
    def __init__(
        self, request: InferenceRequest, metrics: Metrics, calls_of: Callable[[str], Counter] | None = None
    ) -> None:
        super().__init__(request)
        self._metrics = metrics
        self._calls_of = calls_of

    def ended(self, code: str, error: GatewayError | None) -> None:
        self._metrics.count_triton_call(self.request.model, code)
        if self._calls_of is not None:
            self._calls_of(code).inc()
