"""The documented names and labels of metrics."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.api.sessions.open_sessions import metrics_of_sessions
from app.coalescing.shared_calls import SharedCallMetrics
from app.core.answer import Tokens
from app.core.errors import Outcome
from app.core.inference import InferenceRequest
from app.observability.metrics import CallMetrics, Metrics, SharedMemoryMetrics

LABELS_BY_METRIC = {
    "requests": {"pipeline", "transport", "outcome"},
    "request_duration_seconds": {"pipeline", "transport", "outcome"},
    "overhead_seconds": {"pipeline", "transport"},
    "time_to_first_output_seconds": {"pipeline"},
    "inter_output_seconds": {"pipeline"},
    "stream_outputs": {"pipeline"},
    "prompt_tokens": {"pipeline"},
    "completion_tokens": {"pipeline"},
    "time_per_output_token_seconds": {"pipeline"},
    "in_flight_requests": {"pipeline"},
    "active_streams": {"pipeline"},
    "open_websockets": {"pipeline"},
    "websockets": {"pipeline", "reason"},
    "queue_seconds": {"pipeline"},
    "requests_running": set[str](),
    "requests_waiting": set[str](),
    "requests_running_by_pipeline": {"pipeline"},
    "requests_waiting_by_pipeline": {"pipeline"},
    "in_flight_limit": {"model"},
    "kept_streams": set[str](),
    "kept_stream_bytes": set[str](),
    "open_sessions": {"pipeline"},
    "sessions": {"pipeline", "reason"},
    "request_parts": {"pipeline"},
    "items_per_call": {"model"},
    "coalesced_requests": {"model"},
    "coalesced_repeats": {"model"},
    "early_exits": {"pipeline", "reason"},
    "rejected": {"reason"},
    "contract_violations": {"pipeline", "tensor"},
    "model_exceptions": {"pipeline"},
    "triton_calls": {"model", "code"},
    "large_calls": {"way"},
    "shared_memory_bytes": {"state"},
    "stub_deaths": {"model"},
    "engine_deaths": {"model"},
    "worker_deaths": set[str](),
    "out_of_files": set[str](),
    "log_lines_dropped": set[str](),
    "triton_up": set[str](),
    "triton_calls_by_address": {"address", "code"},
    "triton_ejections": {"address", "reason"},
    "triton_repeats": set[str](),
    "open_breakers": {"model"},
    "model_ready": {"model"},
    "config_reload_failed": set[str](),
    "build_info": {"version"},
    "process_cpu_seconds": set[str](),
    "process_max_fds": set[str](),
    "process_open_fds": set[str](),
    "process_resident_memory_bytes": set[str](),
    "process_start_time_seconds": set[str](),
    "process_virtual_memory_bytes": set[str](),
}


def filled() -> Metrics:
    metrics = Metrics("1.2.3")
    pipeline = metrics.of_pipeline("p")
    pipeline.count_request("unary", Outcome.OK, 0.1, elsewhere_s=0.099)
    pipeline.queue_time.observe(0.0)
    pipeline.parts.inc(2)
    sessions = metrics_of_sessions(metrics)
    sessions.opened("p")
    sessions.ended("p", "idle")
    shared_calls = SharedCallMetrics(metrics.counter, metrics.histogram)
    shared_calls.called("m", 4, 2)
    shared_calls.repeated("m")
    metrics.show_load({"p": 4}, {"p": 1}, {"p": 2}, {"m": 3})
    metrics.count_triton_call("m", "OK")
    metrics.triton_calls_by_address.labels("a:1", "OK").inc()
    metrics.triton_ejections.labels("a:1", "down").inc()
    metrics.open_breakers.labels("m").inc()
    metrics.stub_deaths.labels("m").inc()
    metrics.engine_deaths.labels("m").inc()
    SharedMemoryMetrics(metrics).called("shared_memory")
    SharedMemoryMetrics(metrics).holds(free=1, used=2, quarantined=3)
    for one in (pipeline.time_to_first_output, pipeline.inter_output):
        one.observe(0.1)
    pipeline.stream_outputs.inc()
    pipeline.count_tokens(Tokens(7, 3))
    pipeline.time_per_output_token.observe(0.02)
    pipeline.active_streams.inc()
    metrics.websockets.opened("p")
    metrics.websockets.ended("p", "client")
    metrics.early_exits.labels("p", "no_text").inc()
    metrics.rejected.labels("draining").inc()
    metrics.contract_violations.labels("p", "T").inc()
    metrics.model_exceptions.labels("p").inc()
    metrics.model_ready.labels("m").set(1)
    return metrics


def test_metrics_have_the_documented_names_and_labels() -> None:
    families = list(text_string_to_metric_families(generate_latest(filled().registry).decode()))
    found = {
        each.name.removeprefix("triton_gateway_"): {
            label for one in each.samples for label in one.labels if label != "le"
        }
        for each in families
        if not each.name.endswith("_created")
    }
    assert found == LABELS_BY_METRIC
    assert all(each.documentation for each in families)


def test_gateways_do_not_share_counters() -> None:
    first, second = Metrics("1"), Metrics("1")
    first.count_triton_call("m", "OK")
    assert second.registry.get_sample_value("triton_gateway_triton_calls_total", {"model": "m", "code": "OK"}) is None


def test_a_call_is_counted_by_model_and_code() -> None:
    metrics = Metrics("1")
    CallMetrics(metrics).started(InferenceRequest("m", ()), "ModelInfer").ended("CANCELLED", None)
    labels = {"model": "m", "code": "CANCELLED"}
    assert metrics.registry.get_sample_value("triton_gateway_triton_calls_total", labels) == 1.0


def test_a_series_appears_with_its_first_use() -> None:
    metrics = Metrics("1")
    pipeline = metrics.of_pipeline("p")
    assert series_of(metrics, "p") == set()
    pipeline.count_request("unary", Outcome.OK, 0.1, 0.0)
    assert series_of(metrics, "p") == {
        ("requests_total", "unary", "ok"),
        ("request_duration_seconds_count", "unary", "ok"),
        ("overhead_seconds_count", "unary", None),
    }
    pipeline.active_streams.inc()
    assert ("active_streams", None, None) in series_of(metrics, "p")


def test_every_use_of_a_pipelines_name_counts_in_the_same_series() -> None:
    metrics = Metrics("1")
    for transport in ("unary", "sse", "unary"):
        metrics.of_pipeline("p").count_request(transport, Outcome.OK, 0.1, 0.0)
    labels = {"pipeline": "p", "transport": "unary", "outcome": "ok"}
    assert metrics.registry.get_sample_value("triton_gateway_requests_total", labels) == 2.0


def series_of(metrics: Metrics, pipeline: str) -> set[tuple[str, str | None, str | None]]:
    """Returns name, transport and outcome of each series of a pipeline; a histogram has one entry, its count."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (each.name.removeprefix("triton_gateway_"), each.labels.get("transport"), each.labels.get("outcome"))
        for family in families
        for each in family.samples
        if each.labels.get("pipeline") == pipeline and not each.name.endswith(("_bucket", "_sum", "_created"))
    }
