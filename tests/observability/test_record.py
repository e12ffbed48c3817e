"""The log line, the metrics and the spans of each request. docs/reference/metrics.md pins the metrics."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.core.answer import Tokens
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
from app.core.inference import InferenceRequest, SentAs, TraceContext
from app.observability.metrics import CountedCall, Metrics
from app.observability.otlp import OtlpTracer
from app.observability.record import RequestRecord, request_id_of
from app.observability.tracing import end_request_span, end_stream_span, traced_call, tracer_of
from tests.api.conftest import PNG, scripted
from tests.toolkit.collector import Collector, Span, collecting
from tests.toolkit.models import refusal


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
    inference().count(metrics)
    assert series_of(metrics, "p") == {
        ("requests_total", "unary", "ok"),
        ("request_duration_seconds_count", "unary", "ok"),
        ("overhead_seconds_count", "unary", None),
    }
    for transport in ("sse", "unary"):
        replace(inference(), transport=transport).count(metrics)
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


CALLER = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "a=1,b=2")
UNSAMPLED = TraceContext(CALLER.trace_id, CALLER.span_id, 0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
async def tracer(collector: Collector) -> AsyncIterator[OtlpTracer]:
    opened = tracer_of(f"{collector.url}/v1/traces", "1.2.3")
    assert opened is not None
    yield opened
    await opened.close()


async def sent(tracer: OtlpTracer, collector: Collector) -> list[Span]:
    await tracer.close()
    return collector.spans


def failing(error: GatewayError) -> RequestRecord:
    record = inference()
    record.status = 502
    record.fail(error)
    return record


async def test_the_trace_context_is_read_from_exactly_one_valid_header() -> None:
    own, states = ("traceparent", CALLER.traceparent), [("tracestate", "a=1"), ("tracestate", "b=2")]
    traces = {(own, *states): CALLER, tuple(states): None, (("traceparent", "garbage"),): None, (own, own): None}
    async with scripted() as api:
        for headers, trace in traces.items():
            await api.client.post("/v1/pipelines/read", files={"image": PNG}, headers=list(headers))
            assert api.engine.requests[-1].trace == trace


async def test_without_a_collector_the_parent_is_the_callers_span() -> None:
    assert tracer_of(None, "1.2.3") is None
    requests: dict[str, dict[str, Any]] = {"read": {"files": {"image": PNG}}, "write/stream": {"json": {"prompt": "x"}}}
    async with scripted() as api:
        for path, body in requests.items():
            for headers, trace in (({}, None), ({"traceparent": CALLER.traceparent, "tracestate": "a=1,b=2"}, CALLER)):
                await api.client.post(f"/v1/pipelines/{path}", headers=headers, **body)
                assert api.engine.requests[-1].trace == trace


def test_without_a_collector_the_sdk_is_not_imported() -> None:
    script = (
        "import sys, app.process.serving; "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


async def test_a_request_span_has_the_callers_parent_and_the_outcome(tracer: OtlpTracer, collector: Collector) -> None:
    record = inference(triton_request_id="tid")
    record.exit_early("no_text")
    span = tracer.start("POST", "SERVER", CALLER)
    end_request_span(span, record, "/v1/pipelines/{name}")
    (seen,) = await sent(tracer, collector)
    assert (seen.name, seen.kind, seen.service) == ("POST /v1/pipelines/{name}", 2, "triton-gateway")
    assert (seen.trace_id, seen.parent_id) == (CALLER.trace_id, CALLER.span_id)
    assert span.trace is not None
    assert (span.trace.span_id, span.trace.state) == (seen.span_id, "a=1,b=2")
    assert not seen.is_error
    assert seen.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/pipelines/{name}",
        "http.response.status_code": 200,
        "triton_gateway.request_id": "rid",
        "triton_gateway.triton_request_id": "tid",
        "triton_gateway.pipeline": "p",
        "triton_gateway.transport": "unary",
        "triton_gateway.outcome": "early_exit",
        "triton_gateway.early_exit": "no_text",
    }


async def test_the_span_of_a_request_links_to_the_trace_of_its_shared_call(
    tracer: OtlpTracer, collector: Collector
) -> None:
    other = TraceContext("5" * 32, "6" * 16, 1)
    for trace in (other, CALLER):
        record = RequestRecord("rid", "POST", "/", sent_as=SentAs("tid", other, {"shared_with": 23}), trace=trace)
        end_request_span(tracer.start("POST", "SERVER", CALLER), record, None)
    own, linked = await sent(tracer, collector)
    assert (own.links, linked.links) == ((), (other.span_id,))
    assert linked.attributes["triton_gateway.shared_with"] == 23


@pytest.mark.parametrize(
    ("operation", "tokens", "expected"),
    [
        ("chat", Tokens(7, 3), {"operation.name": "chat", "usage.input_tokens": 7, "usage.output_tokens": 3}),
        ("", Tokens(None, 3), {"operation.name": "generate_content", "usage.output_tokens": 3}),
        ("embeddings", None, {"operation.name": "embeddings"}),
        ("", None, None),
    ],
)
async def test_the_span_of_a_language_model_has_its_tokens(
    tracer: OtlpTracer, collector: Collector, operation: str, tokens: Tokens | None, expected: dict[str, Any] | None
) -> None:
    record = RequestRecord("rid", "POST", "/", pipeline="llama", operation=operation, tokens=tokens)
    end_request_span(tracer.start("POST", "SERVER", CALLER), record, None)
    (seen,) = await sent(tracer, collector)
    found = {name[7:]: value for name, value in seen.attributes.items() if name.startswith("gen_ai.")}
    assert found == ({} if expected is None else {"provider.name": "triton", "request.model": "llama", **expected})


@pytest.mark.parametrize(
    ("error", "is_error"), [(ModelError("secret detail"), True), (InvalidInput("secret detail"), False)]
)
async def test_only_server_faults_mark_a_span_as_error(
    tracer: OtlpTracer, collector: Collector, error: GatewayError, is_error: bool
) -> None:
    end_request_span(tracer.start("POST", "SERVER", None), failing(error), None)
    (seen,) = await sent(tracer, collector)
    assert (seen.is_error, seen.attributes["error.type"], seen.name) == (is_error, error.code, "POST")
    assert "secret" not in str(seen)


async def test_a_stream_span_has_the_result(tracer: OtlpTracer, collector: Collector) -> None:
    span = tracer.start("stream p", "INTERNAL", CALLER)
    end_stream_span(span, outputs=3, outcome=Outcome.MODEL_ERROR, error=ModelError("x"), early_exit=None)
    (seen,) = await sent(tracer, collector)
    assert seen.is_error
    assert seen.attributes == {
        "triton_gateway.outputs": 3,
        "triton_gateway.outcome": "model_error",
        "error.type": "model_error",
    }


async def test_an_unsampled_trace_is_passed_on_but_not_recorded(tracer: OtlpTracer, collector: Collector) -> None:
    span = tracer.start("POST", "SERVER", UNSAMPLED)
    assert span.trace is not None
    assert (span.trace.trace_id, span.trace.is_sampled) == (CALLER.trace_id, False)
    end_request_span(span, failing(ModelError("x")), None)
    assert await sent(tracer, collector) == []


async def test_a_call_is_a_span_and_the_parent_of_tritons_spans(tracer: OtlpTracer, collector: Collector) -> None:
    own = InferenceRequest("m", ())  # a call of the gateway itself starts no trace
    call = traced_call(tracer, own, "ModelInfer")
    call.ended("OK", None)
    assert call.request is own
    request = InferenceRequest("m", (), trace=CALLER)
    call = traced_call(tracer, request, "ModelInfer")
    call.ended("OK", None)
    (seen,) = await sent(tracer, collector)
    assert (seen.name, seen.kind, seen.parent_id) == ("ModelInfer m", 3, CALLER.span_id)
    assert seen.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.GRPCInferenceService/ModelInfer",
        "rpc.response.status_code": "OK",
        "triton.model_name": "m",
        "triton.request_id": request.request_id,
    }
    assert call.request.trace == TraceContext(CALLER.trace_id, seen.span_id, 1, "a=1,b=2")


@pytest.mark.parametrize(
    ("code", "error"), [("INVALID_ARGUMENT", refusal("user text", "INVALID_ARGUMENT")), ("CANCELLED", None)]
)
async def test_the_span_of_a_call_has_its_code_and_never_its_message(
    tracer: OtlpTracer, collector: Collector, code: str, error: GatewayError | None
) -> None:
    traced_call(tracer, InferenceRequest("m", (), trace=CALLER), "ModelStreamInfer").ended(code, error)
    (seen,) = await sent(tracer, collector)
    assert (seen.name, seen.is_error) == ("ModelStreamInfer m", error is not None)
    assert seen.attributes["rpc.response.status_code"] == code
    assert "user text" not in str(seen)


async def test_otel_service_name_overrides_the_service_name(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front-door")
    tracer = OtlpTracer(f"{collector.url}/v1/traces", "1.2.3")
    tracer.start("POST", "SERVER", None).end({})
    assert [span.service for span in await sent(tracer, collector)] == ["front-door"]


async def test_closing_does_not_wait_for_a_silent_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system accepts the connection, but there is no answer."""
    monkeypatch.setattr("app.observability.otlp.CLOSE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.CRITICAL):
        tracer = OtlpTracer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "1.2.3")
        tracer.start("POST", "SERVER", None).end({})
        started = time.monotonic()
        await tracer.close()
        assert time.monotonic() - started < 5.0
