"""Between the routes and the work: runs a pipeline or opens its stream, and notes on the request's record what came."""

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.api.problems import problem_of
from app.api.state import Gateway
from app.domain.deadline import Deadline
from app.domain.errors import ClientClosedRequest, ContractViolation, DeadlineExceeded, UpstreamUnavailable
from app.domain.inference import InferenceRequest
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import Kind, Span, end_stream_span
from app.pipelines.collector import Collector, Result
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import run
from app.streams.event import Event
from app.streams.stream import Stream, StreamPlan


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call of a pipeline."""

    pipeline: Pipeline
    inference: InferenceRequest
    deadline: Deadline
    record: RequestRecord


async def answer(gateway: Gateway, call: Call) -> Result:
    """One unary answer. What nobody waits for any more is also stopped inside Triton."""
    record = call.record
    inference = replace(call.inference, trace=record.trace)
    record.triton_request_id = inference.request_id
    started = time.perf_counter()
    try:
        result = await run(gateway.engine, call.pipeline, inference, call.deadline)
    except (asyncio.CancelledError, DeadlineExceeded, ContractViolation):
        gateway.canceller.cancel(call.pipeline, call.inference)
        raise
    finally:
        record.triton_s = time.perf_counter() - started
    record.exit_early(result.early_exit)
    return result


async def open_stream(gateway: Gateway, call: Call) -> tuple[Stream, list[Event]]:
    """A started stream and its first events, none if it is still silent after ``commit_s``.

    Raises the error of a stream that failed before its first output: it still gets an HTTP status.
    """
    stream = Stream(_plan_of(gateway, call, functools.partial(_note_end, call.record)))
    gateway.start_stream(stream, call.pipeline.name)
    try:
        opening = await _first_events(stream, call.pipeline.stream_spec().commit_s)
    except asyncio.CancelledError:
        stream.end(ClientClosedRequest("The client went away before the first output."))
        raise
    if opening and opening[0].name == "error" and stream.error is not None:
        raise stream.error
    return stream, opening


async def start_resumable(gateway: Gateway, call: Call) -> str:
    """The id of a stream that goes on by itself. It is counted, and logged, when it ends: not with its POST.

    Raises UpstreamUnavailable where its store is away: then nothing was started, and the POST itself is counted.
    """
    posted, call = call.record, replace(call, record=call.record.handed_over())

    def close_record(stream: Stream) -> None:
        _note_end(call.record, stream)
        call.record.close(gateway.metrics)

    stream = Stream(_plan_of(gateway, call, close_record), gateway.store.new_log())
    try:
        stream_id = await gateway.store.keep(stream, call.pipeline.stream_spec().resume_s)
    except UpstreamUnavailable:
        posted.transport = call.record.transport
        raise
    gateway.start_stream(stream, call.pipeline.name)
    return stream_id


def _plan_of(gateway: Gateway, call: Call, on_end: Callable[[Stream], None]) -> StreamPlan:
    pipeline, record = call.pipeline, call.record
    record.triton_request_id = call.inference.request_id
    span = gateway.tracer.start(f"stream {pipeline.name}", Kind.INTERNAL, record.trace)
    inference = replace(call.inference, trace=span.trace)
    return StreamPlan(
        request_id=record.request_id,
        responses=gateway.engine.infer_stream(inference, call.deadline),
        answer=Collector(pipeline, call.inference),
        progress_s=pipeline.stream_spec().progress_s,
        problem_of=functools.partial(problem_of, request_id=record.request_id),
        on_output=OutputTimes(gateway.metrics, pipeline.name, record.started).note,
        on_abandoned=functools.partial(gateway.canceller.cancel, pipeline, call.inference),
        on_end=functools.partial(_end, span, on_end),
    )


def _end(span: Span, on_end: Callable[[Stream], None], stream: Stream) -> None:
    end_stream_span(
        span, outputs=stream.outputs, outcome=stream.outcome, error=stream.error, early_exit=stream.early_exit
    )
    on_end(stream)


async def _first_events(stream: Stream, commit_s: float) -> list[Event]:
    try:
        async with asyncio.timeout(commit_s):
            return await stream.log.read(0)
    except TimeoutError:
        return []


def _note_end(record: RequestRecord, stream: Stream) -> None:
    record.triton_s = max(record.duration_s - stream.own_s, 0.0)
    record.exit_early(stream.early_exit)
    if stream.error is not None:
        record.fail(stream.error)


class OutputTimes:
    """When the outputs of one stream came: time to the first, gaps between the others."""

    def __init__(self, metrics: Metrics, pipeline: str, started: float) -> None:
        self._first = metrics.time_to_first_output.labels(pipeline)
        self._gap = metrics.inter_output.labels(pipeline)
        self._count = metrics.stream_outputs.labels(pipeline)
        self._last = started
        self._seen_any = False

    def note(self) -> None:
        now = time.perf_counter()
        (self._gap if self._seen_any else self._first).observe(now - self._last)
        self._last, self._seen_any = now, True
        self._count.inc()
