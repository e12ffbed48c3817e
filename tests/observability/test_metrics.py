"""How metrics are counted. docs/reference/metrics.md pins their names and labels."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.core.errors import Outcome
from app.core.inference import InferenceRequest
from app.observability.metrics import CountedCall, Metrics


def test_gateways_do_not_share_counters() -> None:
    first, second = Metrics("1"), Metrics("1")
    first.calls_of("m", "OK").inc()
    assert second.registry.get_sample_value("triton_gateway_triton_calls_total", {"model": "m", "code": "OK"}) is None


def test_a_call_is_counted_by_model_and_code() -> None:
    metrics = Metrics("1")
    CountedCall(metrics, "", InferenceRequest("m", ()), "ModelInfer").ended("CANCELLED", None)
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
