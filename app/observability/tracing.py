"""Spans of a request, of a stream, of a call to Triton; without a collector there are none, and nothing is imported."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError, Outcome
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.trace import TraceContext
from app.observability.layer import EngineLayer
from app.observability.record import RequestRecord

Attributes = Mapping[str, str | int]

_FAULTS = {
    Outcome.MODEL_ERROR,
    Outcome.CONTRACT_VIOLATION,
    Outcome.TIMEOUT,
    Outcome.UNAVAILABLE,
    Outcome.INTERNAL,
}
"""Outcomes that make a span an error; what is the caller's doing does not (OpenTelemetry: HTTP server spans)."""


class Kind(StrEnum):
    SERVER = "server"
    INTERNAL = "internal"
    CLIENT = "client"


class Span(Protocol):
    """``trace`` is what its children have as their parent."""

    @property
    def trace(self) -> TraceContext | None: ...

    def end(self, attributes: Attributes, *, name: str | None = None, error: str | None = None) -> None:
        """``error``: the code of what failed, which makes the span an error; ``name`` replaces the first one."""


class Tracer(Protocol):
    def start(self, name: str, kind: Kind, parent: TraceContext | None) -> Span: ...

    async def close(self) -> None:
        """Sends what is left, for a few seconds at most."""


class TracingUnavailable(Exception):
    """Spans are asked for, and what sends them is not installed."""


class NoSpan:
    """Children of a span that is none are children of its parent."""

    def __init__(self, parent: TraceContext | None) -> None:
        self.trace = parent

    def end(self, attributes: Attributes, *, name: str | None = None, error: str | None = None) -> None:
        pass


class NoTracer:
    def start(self, name: str, kind: Kind, parent: TraceContext | None) -> Span:
        return NoSpan(parent)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def open_tracer(url: str | None, version: str) -> AsyncIterator[Tracer]:
    """``url``: the collector's address for traces; None: no spans. Raises TracingUnavailable."""
    tracer = NoTracer() if url is None else _otlp_tracer(url, version)
    try:
        yield tracer
    finally:
        await tracer.close()


def _otlp_tracer(url: str, version: str) -> Tracer:
    try:
        from app.observability.otlp import OtlpTracer  # noqa: PLC0415 - costs memory, and is an extra
    except ModuleNotFoundError as exc:
        raise TracingUnavailable(
            "GATEWAY_OTLP_ENDPOINT needs the extra `otel`: pip install 'triton-gateway[otel]'"
        ) from exc
    return OtlpTracer(url, version)


def trace_of(traceparents: Sequence[str], tracestates: Sequence[str]) -> TraceContext | None:
    """The caller's, of the values of its headers; None where there is not exactly one valid ``traceparent``."""
    return TraceContext.parse(traceparents[0], ",".join(tracestates)) if len(traceparents) == 1 else None


def end_request_span(span: Span, record: RequestRecord, route: str | None) -> None:
    """``route``: the path's template; None where there is none for it."""
    attributes: dict[str, str | int] = {
        "http.request.method": record.method,
        "triton_gateway.request_id": record.request_id,
        **_outcome_of(record.outcome, record.error, record.early_exit),
    }
    if record.status:
        attributes["http.response.status_code"] = record.status
    if record.transport is not None:
        attributes |= {"triton_gateway.pipeline": record.pipeline, "triton_gateway.transport": record.transport}
    if record.triton_request_id:
        attributes["triton_gateway.triton_request_id"] = record.triton_request_id
    if route is not None:
        attributes["http.route"] = route
    name = record.method if route is None else f"{record.method} {route}"
    span.end(attributes, name=name, error=_fault_of(record.outcome, record.error))


def end_stream_span(
    span: Span, *, outputs: int, outcome: Outcome | None, error: GatewayError | None, early_exit: str | None
) -> None:
    """With the stream's terminal event."""
    outcome = outcome or Outcome.OK
    attributes = {"triton_gateway.outputs": outputs, **_outcome_of(outcome, error, early_exit)}
    span.end(attributes, error=_fault_of(outcome, error))


class TracedEngine(EngineLayer):
    """An engine that opens a span for each inference call; Triton's own spans are its children."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        super().__init__(engine)
        self._tracer = tracer

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        with self._call(request, "ModelInfer") as traced:
            return await self._engine.infer(traced, deadline)

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        with self._call(request, "ModelStreamInfer") as traced:
            async with aclosing(self._engine.infer_stream(traced, deadline)) as responses:
                async for response in responses:
                    yield response

    @contextmanager
    def _call(self, request: InferenceRequest, method: str) -> Iterator[InferenceRequest]:
        """The request as a child of the call's span, which says how the call inside ended.

        A request without a trace is the gateway's own, such as a warm-up.
        """
        if request.trace is None:
            yield request
            return
        span = self._tracer.start(f"{method} {request.model}", Kind.CLIENT, request.trace)
        code, error = "OK", None
        try:
            yield replace(request, trace=span.trace)
        except GatewayError as exc:
            code = (exc.upstream.grpc_code if exc.upstream else None) or "UNKNOWN"
            error = code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        finally:
            span.end(_call_attributes(request, method, code), error=error)


def _call_attributes(request: InferenceRequest, method: str, code: str) -> Attributes:
    return {
        "rpc.system.name": "grpc",
        "rpc.method": f"inference.GRPCInferenceService/{method}",
        "rpc.response.status_code": code,
        "triton.model_name": request.model,
        "triton.request_id": request.request_id,
    }


def _outcome_of(outcome: Outcome, error: GatewayError | None, early_exit: str | None) -> Attributes:
    attributes = {"triton_gateway.outcome": str(outcome)}
    if error is not None:
        attributes["error.type"] = error.code
    if early_exit is not None:
        attributes["triton_gateway.early_exit"] = early_exit
    return attributes


def _fault_of(outcome: Outcome, error: GatewayError | None) -> str | None:
    return error.code if error is not None and outcome in _FAULTS else None
