"""Runs pipelines and opens their streams for the routes, and writes what happened on each request's record."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import choice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app.admission.admission import Admission, ModelLoad, PipelineAdmission, PipelineLimits
from app.admission.keys import ANYONE, Caller, Key
from app.admission.scheduler import Slot
from app.api.access import allows_pipeline, check_pipeline
from app.api.deadlines import deadline_of
from app.api.exchange import Exchange
from app.api.explaining import Explaining
from app.api.problems import problem_of
from app.api.workload import Workload
from app.core.engine import Engine
from app.core.errors import ClientClosedRequest, ContractViolation, DeadlineExceeded, GatewayError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import NoTracer, SpanKind, Tracer, end_stream_span
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Canceller, Collecting, Collector, Result, run
from app.streams.events import Event
from app.streams.store import StartKey, StreamStore
from app.streams.stream import ProblemOf, Stream, StreamAnswer, StreamPlan


class PipelineCall(Struct, frozen=True, eq=False):
    """One checked call of a pipeline."""

    pipeline: Pipeline
    inference: InferenceRequest
    deadline: Deadline
    record: RequestRecord
    caller: Caller = ANYONE


@dataclass(frozen=True, slots=True)
class StreamFormat:
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
    admission: Admission = field(default_factory=Admission)
    explaining: Explaining | None = None
    """None if no request may be explained."""
    _entrances: dict[str, tuple[Pipeline, Mapping[str, int], PipelineAdmission]] = field(default_factory=dict)

    def may_explain(self, key: Key | None) -> bool:
        """Whether ``X-Explain`` has an effect for a caller with this key."""
        return self.explaining is not None and self.explaining.allows(key)

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
        if exchange.asks_for_explanation and self.explaining is not None:
            self.explaining.begin(exchange, pipeline)
        return pipeline

    def check_load(self, pipeline: Pipeline, caller: Caller, deadline: Deadline) -> None:
        """Raises TooManyRequests if the request would be refused now. Call it before the body is read."""
        self._entrance_of(pipeline).check(caller, deadline)

    def check_load_of_any(self, exchange: Exchange, timeout_of: Callable[[Pipeline], float | None]) -> None:
        """Raises TooManyRequests if the request would be refused now, whichever pipeline its body names.

        Call it before the body is read. ``timeout_of``: the longest deadline, in seconds, of a request to a pipeline;
        None if the body cannot name that pipeline.
        """
        allowed = (entry for name, entry in self.catalog.entries.items() if allows_pipeline(exchange.key, name))
        refusing: list[tuple[Pipeline, Deadline]] = []
        for pipeline in (entry.pipeline for entry in allowed):
            timeout_s = None if pipeline is None else timeout_of(pipeline)
            if pipeline is None or timeout_s is None:
                continue
            deadline = deadline_of(exchange, timeout_s)
            if self._entrance_of(pipeline).admits(exchange.caller, deadline):
                return
            refusing.append((pipeline, deadline))
        if refusing:
            pipeline, deadline = choice(refusing)  # spreads the reserved retry times over the pipelines
            self.check_load(pipeline, exchange.caller, deadline)

    def take_slot(self, call: PipelineCall) -> Awaitable[Slot]:
        """A slot for the call, maybe after a wait in the queue. Raises TooManyRequests or DeadlineExceeded."""
        return self.take_slot_at(self._entrance_of(call.pipeline), call.caller, call.deadline, call.record)

    async def take_slot_at(
        self, entrance: PipelineAdmission, caller: Caller, deadline: Deadline, record: RequestRecord
    ) -> Slot:
        """A slot of this queue, maybe after a wait. Raises TooManyRequests or DeadlineExceeded."""
        slot = entrance.try_enter(caller)
        if slot is None:
            started = time.perf_counter()
            try:
                slot = await entrance.enter(caller, deadline)
            finally:
                record.queue_s = time.perf_counter() - started
        self.metrics.of_pipeline(entrance.name).queue_time.observe(record.queue_s)
        return slot

    def take_free_slot(self, call: PipelineCall) -> Slot | None:
        """Returns a further slot for a call that already has one, if no other request waits for it."""
        return self._entrance_of(call.pipeline).try_enter(call.caller)

    def limits_of(self, pipeline: Pipeline) -> dict[str, Any]:
        """For the catalog. ``in_flight`` is the number now; ``adapts``: whether it follows what is measured."""
        entrance = self._entrance_of(pipeline)
        given = entrance.limits
        return {
            "in_flight": entrance.model_queue.limit.value,
            "adapts": pipeline.spec.model not in self.catalog.exposed.in_flight,
            "queue": entrance.own.max_waiting,
            "per_key": given.per_key,
        }

    def show_load(self) -> None:
        """Brings the gauges of admission up to date."""
        entrances = self.admission.entrances.values()
        unary = self.workload.unary_requests()
        in_flight = {each.name: unary[each.name] for each in entrances}
        load = Counter[str](), Counter[str]()
        for entrance in entrances:
            for counted, count in zip(load, (entrance.own.running, entrance.own.waiting), strict=True):
                counted[entrance.name] += count
        limits = {each.model: each.limit.value for each in self.admission.model_queues.values()}
        self.metrics.show_load(in_flight, *load, limits)

    def _entrance_of(self, pipeline: Pipeline) -> PipelineAdmission:
        known, in_flight = self._entrances.get(pipeline.name), self.catalog.exposed.in_flight
        if known is not None and known[0] is pipeline and known[1] is in_flight:
            return known[2]
        spec, model = pipeline.spec.limits, pipeline.spec.model
        limits = PipelineLimits() if spec is None else PipelineLimits(spec.in_flight, spec.queue, spec.per_key)
        load = ModelLoad(model, pipeline.capacity, in_flight.get(model))
        entrance = self.admission.entrance(pipeline.name, load, limits)
        self._entrances[pipeline.name] = pipeline, in_flight, entrance
        return entrance

    async def answer(self, call: PipelineCall, answer: Collecting | None = None) -> Result:
        """One unary answer. Also calls the pipeline's ``cancel`` model if the gateway ends the request early.

        ``answer``: as of ``run``.
        """
        with await self.take_slot(call) as slot:
            return await self.answer_in(slot, call, answer)

    async def answer_in(self, slot: Slot, call: PipelineCall, answer: Collecting | None = None) -> Result:
        """One unary answer of a call that has its slot. Also calls the ``cancel`` model, as :meth:`answer` does."""
        if call.pipeline.config.decoupled:
            answer = _Timed(answer or Collector(call.pipeline, call.inference), slot)
        record = call.record
        inference = call.pipeline.with_deadline(call.inference, call.deadline).with_trace(record.trace)
        record.triton_request_id = inference.request_id
        started = record.triton_at = time.perf_counter()
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

    async def open_stream(self, call: PipelineCall, writing: StreamFormat | None = None) -> tuple[Stream, list[Event]]:
        """A started stream and its first events, none if it is still silent after ``commit_s``.

        Raises the error of a stream that failed before its first output: it still gets an HTTP status.
        """
        commit_s = call.pipeline.stream_spec().commit_s
        slot = await self.take_slot(call)
        stream = Stream(self._plan_of(call, StreamRecorder(self, *self._recorded(call), slot), writing))
        return stream, await self.opened(stream, call.pipeline.name, commit_s)

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

    def _recorded(self, call: PipelineCall) -> tuple[str, RequestRecord, Callable[[], None]]:
        """The description of a call for a StreamRecorder, without the call's inputs."""
        abandon = partial(self.canceller.cancel, call.pipeline, call.inference.without_inputs())
        return call.pipeline.name, call.record, abandon

    async def start_resumable(
        self, call: PipelineCall, store: StreamStore, slot: Slot, start: StartKey | None = None
    ) -> str:
        """The id of a new stream that outlives its POST. It is counted and logged when it ends, not with the POST.

        ``slot``: its slot, which it gives back when it ends. ``start``: its claimed idempotency key.

        Raises TooManyRequests if the store is full, UpstreamUnavailable if it does not answer: then nothing was
        started, and the POST is counted.
        """
        posted, call = call.record, replace(call, record=call.record.handed_over())
        stream = Stream(self._plan_of(call, ResumableRecorder(self, *self._recorded(call), slot)), store.new_log())
        try:
            stream_id = await store.keep(stream, call.pipeline.stream_spec().resume_s, call.record.key, start)
        except BaseException as exc:
            slot.leave(exc)
            if isinstance(exc, GatewayError):
                posted.take_back(call.record)
            raise
        self._start(stream, call.pipeline.name)
        return stream_id

    def _plan_of(
        self, call: PipelineCall, recorder: "StreamRecorder", writing: StreamFormat | None = None
    ) -> StreamPlan:
        record, writing = call.record, writing or StreamFormat(Collector(call.pipeline, call.inference))
        record.triton_request_id, record.triton_at = call.inference.request_id, time.perf_counter()
        inference = call.pipeline.with_deadline(call.inference, call.deadline).with_trace(recorder.span.trace)
        spec = call.pipeline.stream_spec()
        return StreamPlan(
            request_id=record.request_id,
            responses=self.engine.infer_stream(inference, call.deadline),
            answer=writing.answer,
            deadline=call.deadline,
            progress_s=spec.progress_s,
            lag_s=spec.lag_s,
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


class _Timed:
    """Tells admission when the first response came. Implements :class:`app.pipelines.run.Collecting`."""

    def __init__(self, answer: Collecting, slot: Slot) -> None:
        self._answer = answer
        self._slot = slot

    @property
    def has_enough(self) -> bool:
        return self._answer.has_enough

    def join(self, response: InferenceResponse) -> None:
        self._slot.output()
        self._answer.join(response)

    def result(self, error: GatewayError | None = None) -> Result:
        return self._answer.result(error)


class StreamRecorder:
    """Tells metrics, trace, record and admission what happens to one stream. Implements StreamObserver.

    ``abandon``: makes the model stop, if something knows how. ``slot``: the stream's slot, which it gives back.
    """

    def __init__(
        self, inference: Inference, pipeline: str, record: RequestRecord, abandon: Callable[[], None], slot: Slot
    ) -> None:
        self._slot = slot
        self._inference = inference
        self._record = record
        self._abandon = abandon
        self.span = inference.tracer.start(f"stream {pipeline}", SpanKind.INTERNAL, record.trace)
        metrics = inference.metrics.of_pipeline(pipeline)
        self._first, self._gap, self._count = metrics.time_to_first_output, metrics.inter_output, metrics.stream_outputs
        self._last_at = record.started
        self._has_output = False

    def responded(self) -> None:
        self._slot.output()

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
        record.triton_s = max(record.duration_s - stream.own_s - record.queue_s, 0.0)
        if record.explanation is not None:
            record.explanation.stream_ended = time.perf_counter()
        record.exit_early(stream.early_exit)
        if stream.error is not None:
            record.fail(stream.error)
        self._slot.leave(stream.error)


class ResumableRecorder(StreamRecorder):
    """For a stream whose request has been answered already: the end of the stream also closes its record."""

    def ended(self, stream: Stream) -> None:
        super().ended(stream)
        self._record.close(self._inference.metrics)
