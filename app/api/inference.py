"""Runs a pipeline or opens its stream for a route, and writes what happened on the request's record."""

import asyncio
import time
from dataclasses import dataclass, replace

from app.api.problems import problem_of
from app.api.state import Gateway
from app.domain.deadline import Deadline
from app.domain.errors import ClientClosedRequest, ContractViolation, DeadlineExceeded, UpstreamUnavailable
from app.domain.inference import InferenceRequest
from app.observability.record import RequestRecord
from app.observability.tracing import Kind, end_stream_span
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
    """One unary answer. Also calls the pipeline's ``cancel`` model if the gateway ends the request early."""
    record = call.record
    inference = replace(call.pipeline.with_deadline(call.inference, call.deadline), trace=record.trace)
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
    stream = Stream(_plan_of(gateway, call, StreamRecorder(gateway, call)))
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
    """The id of a new stream that outlives its POST. The stream is counted and logged when it ends, not with the POST.

    Raises UpstreamUnavailable if the store does not answer: then nothing was started, and the POST itself is counted.
    """
    posted, call = call.record, replace(call, record=call.record.handed_over())
    stream = Stream(_plan_of(gateway, call, ResumableRecorder(gateway, call)), gateway.store.new_log())
    try:
        stream_id = await gateway.store.keep(stream, call.pipeline.stream_spec().resume_s)
    except UpstreamUnavailable:
        posted.transport = call.record.transport
        raise
    gateway.start_stream(stream, call.pipeline.name)
    return stream_id


def _plan_of(gateway: Gateway, call: Call, recorder: "StreamRecorder") -> StreamPlan:
    record = call.record
    record.triton_request_id = call.inference.request_id
    inference = replace(call.pipeline.with_deadline(call.inference, call.deadline), trace=recorder.span.trace)
    return StreamPlan(
        request_id=record.request_id,
        responses=gateway.engine.infer_stream(inference, call.deadline),
        answer=Collector(call.pipeline, call.inference),
        deadline=call.deadline,
        progress_s=call.pipeline.stream_spec().progress_s,
        problem_of=problem_of,
        observer=recorder,
    )


async def _first_events(stream: Stream, commit_s: float) -> list[Event]:
    try:
        async with asyncio.timeout(commit_s):
            return await stream.log.read(0)
    except TimeoutError:
        return []


class StreamRecorder:
    """Tells metrics, trace and record what happens to one stream. Implements StreamObserver."""

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self._gateway = gateway
        self._call = call
        self.span = gateway.tracer.start(f"stream {call.pipeline.name}", Kind.INTERNAL, call.record.trace)
        self._first = gateway.metrics.time_to_first_output.labels(call.pipeline.name)
        self._gap = gateway.metrics.inter_output.labels(call.pipeline.name)
        self._count = gateway.metrics.stream_outputs.labels(call.pipeline.name)
        self._last_at = call.record.started
        self._has_output = False

    def output_written(self) -> None:
        now = time.perf_counter()
        (self._gap if self._has_output else self._first).observe(now - self._last_at)
        self._last_at, self._has_output = now, True
        self._count.inc()

    def abandoned(self) -> None:
        self._gateway.canceller.cancel(self._call.pipeline, self._call.inference)

    def ended(self, stream: Stream) -> None:
        end_stream_span(
            self.span, outputs=stream.outputs, outcome=stream.outcome, error=stream.error, early_exit=stream.early_exit
        )
        record = self._call.record
        record.triton_s = max(record.duration_s - stream.own_s, 0.0)
        record.exit_early(stream.early_exit)
        if stream.error is not None:
            record.fail(stream.error)


class ResumableRecorder(StreamRecorder):
    """For a stream whose request has been answered already: the end of the stream also closes its record."""

    def ended(self, stream: Stream) -> None:
        super().ended(stream)
        self._call.record.close(self._gateway.metrics)
