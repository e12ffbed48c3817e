"""Runs pipelines and opens their streams for the routes, and writes what happened on each request's record."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from app.api.access import check_pipeline
from app.api.exchange import Exchange
from app.api.problems import problem_of
from app.api.workload import Workload
from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import ClientClosedRequest, ContractViolation, DeadlineExceeded, UpstreamUnavailable
from app.domain.inference import InferenceRequest
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import Kind, NoTracer, Tracer, end_stream_span
from app.pipelines.cancellation import Canceller
from app.pipelines.catalog import Catalog
from app.pipelines.collector import Collector, Result
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Answer, run
from app.streams.event import Event
from app.streams.store import StreamStore
from app.streams.stream import Answer as StreamAnswer
from app.streams.stream import ProblemOf, Stream, StreamPlan


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call of a pipeline."""

    pipeline: Pipeline
    inference: InferenceRequest
    deadline: Deadline
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Writing:
    """How a stream is written: what the data of its events are."""

    answer: StreamAnswer
    problem_of: ProblemOf = problem_of


@dataclass(slots=True)
class Inference:
    """Every inference of the API: its admission, its run, its metrics and its trace."""

    engine: Engine
    catalog: Catalog
    metrics: Metrics
    canceller: Canceller
    tracer: Tracer = field(default_factory=NoTracer)
    workload: Workload = field(default_factory=Workload)

    def admit(self, exchange: Exchange, name: str, transport: str) -> Pipeline:
        """The pipeline. The request counts as work, under the pipeline's name, until its last byte is sent.

        Raises Forbidden, Draining, UnknownPipeline or ModelNotReady.
        """
        record = exchange.record
        record.transport = transport
        check_pipeline(exchange, self.catalog, name)
        pipeline = self.catalog.pipeline(name)
        record.pipeline = name
        self.workload.begin(exchange.work)
        return pipeline

    def counted(self, pipeline: str) -> AbstractContextManager[None]:
        """Counts a unary request in the metrics for the duration of the block."""
        return self.metrics.of_pipeline(pipeline).in_flight.track_inprogress()

    async def answer(self, call: Call, answer: Answer | None = None) -> Result:
        """One unary answer. Also calls the pipeline's ``cancel`` model if the gateway ends the request early.

        ``answer``: as of ``run``.
        """
        record = call.record
        inference = call.pipeline.with_deadline(call.inference, call.deadline).with_trace(record.trace)
        record.triton_request_id = inference.request_id
        started = time.perf_counter()
        try:
            result = await run(self.engine, call.pipeline, inference, call.deadline, answer)
        except (asyncio.CancelledError, DeadlineExceeded, ContractViolation):
            self.canceller.cancel(call.pipeline, call.inference)
            raise
        finally:
            record.triton_s = time.perf_counter() - started
        if answer is not None and answer.has_enough:
            self.canceller.cancel(call.pipeline, call.inference)
        record.exit_early(result.early_exit)
        return result

    async def open_stream(self, call: Call, writing: Writing | None = None) -> tuple[Stream, list[Event]]:
        """A started stream and its first events, none if it is still silent after ``commit_s``.

        Raises the error of a stream that failed before its first output: it still gets an HTTP status.
        """
        stream = Stream(self._plan_of(call, StreamRecorder(self, *self._recorded(call)), writing))
        return stream, await self.opened(stream, call.pipeline.name, call.pipeline.stream_spec().commit_s)

    async def opened(self, stream: Stream, pipeline: str, commit_s: float | None) -> list[Event]:
        """Starts a stream, which is counted under ``pipeline``, and returns its first events.

        Returns no events if the stream is still silent after ``commit_s``; without a ``commit_s`` it waits for them.
        Raises the error of a stream that failed before its first output.
        """
        self._start(stream, pipeline)
        try:
            opening = await _first_events(stream, commit_s)
        except asyncio.CancelledError:
            stream.end(ClientClosedRequest("The client went away before the first output."))
            raise
        if opening and opening[0].name == "error" and stream.error is not None:
            raise stream.error
        return opening

    def _recorded(self, call: Call) -> tuple[str, RequestRecord, Callable[[], None]]:
        """What a StreamRecorder is told of a call. Does not hold the call's inputs."""
        abandon = partial(self.canceller.cancel, call.pipeline, call.inference.without_inputs())
        return call.pipeline.name, call.record, abandon

    async def start_resumable(self, call: Call, store: StreamStore) -> str:
        """The id of a new stream that outlives its POST. It is counted and logged when it ends, not with the POST.

        Raises UpstreamUnavailable if the store does not answer: then nothing was started, and the POST is counted.
        """
        posted, call = call.record, replace(call, record=call.record.handed_over())
        stream = Stream(self._plan_of(call, ResumableRecorder(self, *self._recorded(call))), store.new_log())
        try:
            stream_id = await store.keep(stream, call.pipeline.stream_spec().resume_s, call.record.key)
        except UpstreamUnavailable:
            posted.transport = call.record.transport
            raise
        self._start(stream, call.pipeline.name)
        return stream_id

    def _plan_of(self, call: Call, recorder: "StreamRecorder", writing: Writing | None = None) -> StreamPlan:
        record, writing = call.record, writing or Writing(Collector(call.pipeline, call.inference))
        record.triton_request_id = call.inference.request_id
        inference = call.pipeline.with_deadline(call.inference, call.deadline).with_trace(recorder.span.trace)
        return StreamPlan(
            request_id=record.request_id,
            responses=self.engine.infer_stream(inference, call.deadline),
            answer=writing.answer,
            deadline=call.deadline,
            progress_s=call.pipeline.stream_spec().progress_s,
            problem_of=writing.problem_of,
            observer=recorder,
        )

    def _start(self, stream: Stream, pipeline: str) -> None:
        """Starts the stream, which counts as work until its terminal event is written."""
        active = self.metrics.of_pipeline(pipeline).active_streams

        def forget(_task: asyncio.Task[None]) -> None:
            self.workload.remove(stream)
            active.dec()

        self.workload.add(stream)
        active.inc()
        stream.start().add_done_callback(forget)


async def _first_events(stream: Stream, commit_s: float | None) -> list[Event]:
    try:
        async with asyncio.timeout(commit_s):
            return await stream.log.read(0)
    except TimeoutError:
        return []


class StreamRecorder:
    """Tells metrics, trace and record what happens to one stream. Implements StreamObserver.

    ``abandon``: makes the model stop, if something knows how.
    """

    def __init__(self, inference: Inference, pipeline: str, record: RequestRecord, abandon: Callable[[], None]) -> None:
        self._inference = inference
        self._record = record
        self._abandon = abandon
        self.span = inference.tracer.start(f"stream {pipeline}", Kind.INTERNAL, record.trace)
        metrics = inference.metrics.of_pipeline(pipeline)
        self._first, self._gap, self._count = metrics.time_to_first_output, metrics.inter_output, metrics.stream_outputs
        self._last_at = record.started
        self._has_output = False

    def output_written(self) -> None:
        now = time.perf_counter()
        (self._gap if self._has_output else self._first).observe(now - self._last_at)
        self._last_at, self._has_output = now, True
        self._count.inc()

    def abandoned(self) -> None:
        self._abandon()

    def ended(self, stream: Stream) -> None:
        end_stream_span(
            self.span, outputs=stream.outputs, outcome=stream.outcome, error=stream.error, early_exit=stream.early_exit
        )
        record = self._record
        record.triton_s = max(record.duration_s - stream.own_s, 0.0)
        record.exit_early(stream.early_exit)
        if stream.error is not None:
            record.fail(stream.error)


class ResumableRecorder(StreamRecorder):
    """For a stream whose request has been answered already: the end of the stream also closes its record."""

    def ended(self, stream: Stream) -> None:
        super().ended(stream)
        self._record.close(self._inference.metrics)
