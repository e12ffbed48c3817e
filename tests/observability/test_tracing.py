"""Spans that a collector receives, and no spans when tracing is off."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from app.core.answer import Tokens
from app.core.errors import GatewayError, InvalidInput, ModelError, Outcome
from app.core.inference import InferenceRequest, SentAs, TraceContext
from app.observability.otlp import OtlpTracer
from app.observability.record import RequestRecord
from app.observability.tracing import (
    SpanKind,
    Tracer,
    end_request_span,
    end_stream_span,
    trace_of,
    traced_call,
    tracer_of,
)
from tests.toolkit.collector import Collector, Span, collecting
from tests.toolkit.models import refusal

CALLER = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "a=1,b=2")
UNSAMPLED = TraceContext(CALLER.trace_id, CALLER.span_id, 0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
async def tracer(collector: Collector) -> AsyncIterator[Tracer]:
    opened = tracer_of(f"{collector.url}/v1/traces", "1.2.3")
    yield opened
    await opened.close()


async def sent(tracer: Tracer, collector: Collector) -> list[Span]:
    await tracer.close()
    return collector.spans


def failing(error: GatewayError) -> RequestRecord:
    record = RequestRecord("rid", "POST", "/v1/pipelines/p", pipeline="p", transport="unary", status=502)
    record.fail(error)
    return record


def test_the_trace_context_is_read_from_exactly_one_valid_header() -> None:
    assert trace_of([CALLER.traceparent], ["a=1", "b=2"]) == TraceContext(CALLER.trace_id, CALLER.span_id, 1, "a=1,b=2")
    for traceparents in ([], ["garbage"], [CALLER.traceparent, CALLER.traceparent]):
        assert trace_of(traceparents, ["a=1"]) is None


def test_without_a_collector_the_parent_is_the_callers_span() -> None:
    assert Tracer().start("POST", SpanKind.SERVER, CALLER).trace == CALLER
    assert Tracer().start("POST", SpanKind.SERVER, None).trace is None


def test_without_a_collector_the_sdk_is_not_imported() -> None:
    script = (
        "import sys, app.process.serving; "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


async def test_a_request_span_has_the_callers_parent_and_the_outcome(tracer: Tracer, collector: Collector) -> None:
    record = RequestRecord(
        "rid", "POST", "/v1/pipelines/p", pipeline="p", transport="unary", status=200, triton_request_id="tid"
    )
    record.exit_early("no_text")
    span = tracer.start("POST", SpanKind.SERVER, CALLER)
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
    tracer: Tracer, collector: Collector
) -> None:
    other = TraceContext("5" * 32, "6" * 16, 1)
    for trace in (other, CALLER):
        record = RequestRecord("rid", "POST", "/", sent_as=SentAs("tid", other, {"shared_with": 23}), trace=trace)
        end_request_span(tracer.start("POST", SpanKind.SERVER, CALLER), record, None)
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
    tracer: Tracer, collector: Collector, operation: str, tokens: Tokens | None, expected: dict[str, Any] | None
) -> None:
    record = RequestRecord("rid", "POST", "/", pipeline="llama", operation=operation, tokens=tokens)
    end_request_span(tracer.start("POST", SpanKind.SERVER, CALLER), record, None)
    (seen,) = await sent(tracer, collector)
    found = {name[7:]: value for name, value in seen.attributes.items() if name.startswith("gen_ai.")}
    assert found == ({} if expected is None else {"provider.name": "triton", "request.model": "llama", **expected})


@pytest.mark.parametrize(
    ("error", "is_error"), [(ModelError("secret detail"), True), (InvalidInput("secret detail"), False)]
)
async def test_only_server_faults_mark_a_span_as_error(
    tracer: Tracer, collector: Collector, error: GatewayError, is_error: bool
) -> None:
    end_request_span(tracer.start("POST", SpanKind.SERVER, None), failing(error), None)
    (seen,) = await sent(tracer, collector)
    assert (seen.is_error, seen.attributes["error.type"], seen.name) == (is_error, error.code, "POST")
    assert "secret" not in str(seen)


async def test_a_stream_span_has_the_result(tracer: Tracer, collector: Collector) -> None:
    span = tracer.start("stream p", SpanKind.INTERNAL, CALLER)
    end_stream_span(span, outputs=3, outcome=Outcome.MODEL_ERROR, error=ModelError("x"), early_exit=None)
    (seen,) = await sent(tracer, collector)
    assert seen.is_error
    assert seen.attributes == {
        "triton_gateway.outputs": 3,
        "triton_gateway.outcome": "model_error",
        "error.type": "model_error",
    }


async def test_an_unsampled_trace_is_passed_on_but_not_recorded(tracer: Tracer, collector: Collector) -> None:
    span = tracer.start("POST", SpanKind.SERVER, UNSAMPLED)
    assert span.trace is not None
    assert (span.trace.trace_id, span.trace.is_sampled) == (CALLER.trace_id, False)
    end_request_span(span, failing(ModelError("x")), None)
    assert await sent(tracer, collector) == []


async def test_a_call_is_a_span_and_the_parent_of_tritons_spans(tracer: Tracer, collector: Collector) -> None:
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
    tracer: Tracer, collector: Collector, code: str, error: GatewayError | None
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
    tracer.start("POST", SpanKind.SERVER, None).end({})
    assert [span.service for span in await sent(tracer, collector)] == ["front-door"]


async def test_closing_does_not_wait_for_a_silent_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system accepts the connection, but there is no answer."""
    monkeypatch.setattr("app.observability.otlp.CLOSE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.CRITICAL):
        tracer = OtlpTracer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "1.2.3")
        tracer.start("POST", SpanKind.SERVER, None).end({})
        started = time.monotonic()
        await tracer.close()
        assert time.monotonic() - started < 5.0
