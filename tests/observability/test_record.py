"""The log line and the metrics of each request. docs/reference/metrics.md pins the names and labels of metrics."""

import logging
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.core.errors import (
    ContractViolation,
    Fault,
    FaultKind,
    GatewayError,
    InvalidInput,
    ModelError,
    Outcome,
    TooManyRequests,
    UpstreamError,
)
from app.core.inference import InferenceRequest, TraceContext
from app.observability.metrics import CountedCall, Metrics
from app.observability.record import RequestRecord, request_id_of


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("1.2.3")


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"triton_gateway_{name}", labels) or 0.0


def line_of(record: RequestRecord, metrics: Metrics, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    with caplog.at_level(logging.DEBUG, "triton_gateway"):
        record.close(metrics)
    (line,) = caplog.records
    return vars(line)


def inference(**more: Any) -> RequestRecord:
    return RequestRecord("rid", "POST", "/v1/pipelines/p", pipeline="p", transport="unary", status=200, **more)


@pytest.mark.parametrize("offered", ["a", "A-b_c.1", "x" * 128])
def test_a_valid_id_of_the_caller_is_kept(offered: str) -> None:
    assert request_id_of(offered) == offered


@pytest.mark.parametrize(
    "offered", [None, "", "x" * 129, "a b", "a\n", "a\r\nX: y", "ä", "a/b", "a;b", "\u0661", "<b>"]
)
def test_an_invalid_id_is_replaced(offered: str | None) -> None:
    made = request_id_of(offered)
    assert made != offered
    assert len(made) == 32


def test_a_successful_request_is_counted_and_logged(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    line = line_of(inference(triton_request_id="tid"), metrics, caplog)
    assert (line["outcome"], line["pipeline"], line["transport"], line["status"]) == ("ok", "p", "unary", 200)
    assert (line["request_id"], line["triton_request_id"], line["levelname"]) == ("rid", "tid", "INFO")
    assert "code" not in line
    assert sample(metrics, "requests_total", pipeline="p", transport="unary", outcome="ok") == 1
    assert sample(metrics, "overhead_seconds_count", pipeline="p", transport="unary") == 1


def test_the_fields_of_a_line_and_their_order(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    record = inference(triton_request_id="tid", triton_s=0.0012345, trace=TraceContext("a" * 32, "b" * 16, 1))
    record.exit_early("no_text")
    record.error = InvalidInput("no")
    record.error.upstream = UpstreamError("INTERNAL", "x" * 5000)
    line = line_of(record, metrics, caplog)
    names = [name for name in line if name not in {*vars(logging.makeLogRecord({})), "message"}]
    assert " ".join(names) == (
        "request_id method path status outcome duration_ms pipeline transport queue_ms triton_ms triton_request_id"
        " early_exit trace_id span_id code detail triton_code triton_message"
    )
    assert line["triton_ms"] == 1.23
    assert (line["code"], line["detail"], line["triton_code"]) == ("invalid_input", "no", "INTERNAL")
    assert line["triton_message"] == "x" * 1024
    assert (line["trace_id"], line["span_id"]) == ("a" * 32, "b" * 16)


def test_an_early_exit_is_counted_and_logged(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    record = inference()
    record.exit_early(None)
    assert record.outcome is Outcome.OK
    record.exit_early("no_text")
    assert line_of(record, metrics, caplog)["early_exit"] == "no_text"
    assert sample(metrics, "requests_total", pipeline="p", transport="unary", outcome="early_exit") == 1
    assert sample(metrics, "early_exits_total", pipeline="p", reason="no_text") == 1


def failed(kind: FaultKind | None) -> ModelError:
    error = ModelError("failed")
    error.fault = kind and Fault(kind)
    return error


@pytest.mark.parametrize(
    ("error", "metric", "labels", "counted"),
    [
        (TooManyRequests("full"), "rejected_total", {"reason": "too_many_requests"}, 1),
        (ContractViolation("grew", tensor="T"), "contract_violations_total", {"pipeline": "p", "tensor": "T"}, 1),
        (failed(FaultKind.RAISED), "model_exceptions_total", {"pipeline": "p"}, 1),
        (failed(FaultKind.SHAPE), "model_exceptions_total", {"pipeline": "p"}, 0),
        (failed(None), "model_exceptions_total", {"pipeline": "p"}, 0),
    ],
)
def test_some_errors_have_their_own_metric(
    metrics: Metrics, error: GatewayError, metric: str, labels: dict[str, str], counted: int
) -> None:
    """Exceptions of a model's script are counted, and not its other errors."""
    record = inference()
    record.fail(error)
    record.close(metrics)
    assert sample(metrics, metric, **labels) == counted
    assert sample(metrics, "requests_total", pipeline="p", transport="unary", outcome=error.outcome) == 1


def test_other_requests_are_not_counted_and_logged_at_debug(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord("rid", "GET", "/health/live", status=200)
    assert line_of(record, metrics, caplog)["levelname"] == "DEBUG"
    assert not any(
        each.samples and each.name.endswith("requests") for each in metrics.registry.collect() if each.type == "counter"
    )


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/v1/streams/abc-DEF_123", "/v1/streams/***"),
        ("/v1/streams/abc/x", "/v1/streams/***/x"),
        ("/v1/streams", "/v1/streams"),
    ],
)
def test_the_id_of_a_stream_is_masked(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, path: str, logged: str
) -> None:
    assert line_of(RequestRecord("rid", "GET", path), metrics, caplog)["path"] == logged


def test_the_timing_header_splits_the_time() -> None:
    record = inference(triton_s=0.001, queue_s=0.002)
    record.started -= 0.006
    gateway, queue, triton = record.server_timing().split(", ")
    assert (queue, triton) == ("queue;dur=2.00", "triton;dur=1.00")
    assert 3.0 <= float(gateway.removeprefix("gateway;dur=")) < 100.0
    assert inference(triton_s=100.0).server_timing().startswith("gateway;dur=0.00")


@pytest.mark.parametrize(
    ("status", "outcome", "level"),
    [
        (200, Outcome.OK, "INFO"),
        (422, Outcome.CLIENT_ERROR, "INFO"),
        (502, Outcome.MODEL_ERROR, "WARNING"),
        (200, Outcome.CONTRACT_VIOLATION, "WARNING"),
        (504, Outcome.TIMEOUT, "WARNING"),
        (503, Outcome.UNAVAILABLE, "WARNING"),
        (503, Outcome.REJECTED, "WARNING"),
        (500, Outcome.INTERNAL, "ERROR"),
    ],
)
def test_a_failure_is_logged_as_a_warning(
    status: int, outcome: Outcome, level: str, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    record = inference(outcome=outcome)
    record.status = status
    assert line_of(record, metrics, caplog)["levelname"] == level


def test_a_call_is_counted_by_model_and_code(metrics: Metrics) -> None:
    CountedCall(InferenceRequest("m", ()), "ModelInfer", metrics).ended("CANCELLED", None)
    assert sample(metrics, "triton_calls_total", model="m", code="CANCELLED") == 1


def test_a_series_appears_with_its_first_use(metrics: Metrics) -> None:
    """Every later use of the pipeline's name counts in the same series."""
    pipeline = metrics.of_pipeline("p")
    assert series_of(metrics, "p") == set()
    pipeline.count_request("unary", Outcome.OK, 0.1, 0.0)
    assert series_of(metrics, "p") == {
        ("requests_total", "unary", "ok"),
        ("request_duration_seconds_count", "unary", "ok"),
        ("overhead_seconds_count", "unary", None),
    }
    for transport in ("sse", "unary"):
        metrics.of_pipeline("p").count_request(transport, Outcome.OK, 0.1, 0.0)
    assert sample(metrics, "requests_total", pipeline="p", transport="unary", outcome="ok") == 2.0
    pipeline.active_streams.inc()
    assert ("active_streams", None, None) in series_of(metrics, "p")


def series_of(metrics: Metrics, pipeline: str) -> set[tuple[str, str | None, str | None]]:
    """Returns name, transport and outcome of each series of a pipeline; a histogram has one entry, its count."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (each.name.removeprefix("triton_gateway_"), each.labels.get("transport"), each.labels.get("outcome"))
        for family in families
        for each in family.samples
        if each.labels.get("pipeline") == pipeline and not each.name.endswith(("_bucket", "_sum", "_created"))
    }
