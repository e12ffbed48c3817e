"""Runs the calls of all dialects and opens their streams, and writes what happened on each request's record."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import choice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app.admission.admission import NO_LIMITS, Admission, ModelLoad, PipelineAdmission, PipelineLimits
from app.admission.keys import Caller
from app.admission.scheduler import Slot
from app.api.access import allows_pipeline, check_pipeline
from app.api.deadlines import deadline_of
from app.api.exchange import Exchange
from app.api.parts import PartRunner, PartStreams, Work
from app.api.problems import problem_of
from app.api.workload import Workload
from app.core.answer import Answer, Ending, Tokens
from app.core.batch import Batch, BatchPart
from app.core.coalescing import SharedCall
from app.core.engine import Engine, responses_of
from app.core.errors import ClientClosedRequest, ContractViolation, DeadlineExceeded, GatewayError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import Capacity
from app.core.trace import TraceContext
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import NoTracer, SpanKind, Tracer, end_stream_span
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Canceller, run
from app.pipelines.spec import STREAM_DEFAULTS, StreamSpec
from app.streams.events import Event, EventLog
from app.streams.store import StartKey, StreamStore
from app.streams.stream import ProblemOf, Stream, StreamPlan


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a call runs: a pipeline, or a model by its own name.

    ``admission``: its admission, with its name in metrics and spans. ``prepared``: completes a request before it is
    sent. ``abandon``: makes the model stop a request, if a model for that is declared.
    """

    admission: PipelineAdmission
    decoupled: bool
    stream: StreamSpec
    prepared: Callable[[InferenceRequest, Deadline], InferenceRequest]
    abandon: Callable[[InferenceRequest], None]
    commits: bool = True
    """Whether the answer of a silent stream begins after ``commit_s``; otherwise it waits for the first output."""

    @property
    def name(self) -> str:
        return self.admission.name


class InferenceCall(Struct, frozen=True, eq=False):
    """One checked call. ``problem_of``: the data of a stream's terminal error."""

    target: Target
    inference: InferenceRequest
    answer: Answer
    deadline: Deadline
    record: RequestRecord
    caller: Caller
    problem_of: ProblemOf = problem_of
    further: Sequence[InferenceRequest] = ()
    """Further requests of the same answer, which run at the same time and in the same slot."""
    batch: Batch | None = None
    """The request as parts, which run instead of ``inference`` and have the answer. Each part takes its own slot."""

    def abandon(self) -> None:
        """Stops the model. The parts of a batch are stopped where they run."""
        if self.batch is not None:
            return
        for request in (self.inference, *self.further):
            self.target.abandon(request)


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
    admitted: Sequence[Callable[[Exchange, Pipeline], None]] = ()
    """Are called with each admitted request, and with each step of a session."""
    _targets: dict[str, tuple[Pipeline, Mapping[str, int], Target]] = field(default_factory=dict)

    def admit(self, exchange: Exchange, name: str, transport: str | None) -> Pipeline:
        """The pipeline. The request counts as work, under the pipeline's name, until its last byte is sent.

        ``transport``: None for a request that does not run inference.

        Raises Forbidden, Draining, UnknownPipeline or ModelNotReady.
        """
        record = exchange.record
        record.transport = transport
        pipeline = self.allowed_pipeline(exchange, name)
        record.pipeline = name
        self.workload.begin(exchange.work)
        for admitted in self.admitted:
            admitted(exchange, pipeline)
        return pipeline

    def admit_step(self, exchange: Exchange, pipeline: Pipeline) -> None:
        """A step of an open session, which the gateway also runs while it drains."""
        exchange.record.transport, exchange.record.pipeline = "unary", pipeline.name
        self.workload.add(exchange.work)
        for admitted in self.admitted:
            admitted(exchange, pipeline)

    def allowed_pipeline(self, exchange: Exchange, name: str) -> Pipeline:
        """The pipeline as it is now. Raises Forbidden, UnknownPipeline or ModelNotReady."""
        if exchange.key is not None:  # spares most requests a call
            check_pipeline(exchange, self.catalog, name)
        return self.catalog.pipeline(name)

    def target_of(self, pipeline: Pipeline) -> Target:
        """Returns the same object until the pipeline or a limit of its model changes."""
        known, in_flight = self._targets.get(pipeline.name), self.catalog.oip_models.in_flight
        if known is None or known[0] is not pipeline or known[1] is not in_flight:
            known = self._targets[pipeline.name] = pipeline, in_flight, self._new_target(pipeline)
        return known[2]

    def _new_target(self, pipeline: Pipeline) -> Target:
        spec = pipeline.spec.limits
        limits = PipelineLimits() if spec is None else PipelineLimits(spec.in_flight, spec.queue, spec.per_key)
        return Target(
            admission=self.admission_of(pipeline.name, pipeline.spec.model, pipeline.capacity, limits),
            decoupled=pipeline.config.decoupled,
            stream=pipeline.spec.stream or STREAM_DEFAULTS,
            prepared=pipeline.prepared,
            abandon=partial(self.canceller.cancel, pipeline),
        )

    def admission_of(
        self, name: str, model: str, capacity: Capacity, limits: PipelineLimits = NO_LIMITS
    ) -> PipelineAdmission:
        """The admission of calls that count under ``name``. All calls of a model use the same queue."""
        load = ModelLoad(model, capacity, self.catalog.oip_models.in_flight.get(model))
        return self.admission.of(name, load, limits)

    def allowed(self, exchange: Exchange) -> Iterator[Pipeline]:
        """The pipelines that can be called, of those that the caller's key allows."""
        for name, entry in self.catalog.entries.items():
            pipeline = entry.pipeline
            if pipeline is not None and allows_pipeline(exchange.key, name):
                yield pipeline

    def check_load_of_any(self, exchange: Exchange, timeout_of: Callable[[Pipeline], float | None]) -> None:
        """Raises TooManyRequests if the request would be refused now, whichever pipeline its body names.

        Call it before the body is read. ``timeout_of``: the longest deadline, in seconds, of a request to a pipeline;
        None if the body cannot name that pipeline.
        """
        refusing: list[tuple[PipelineAdmission, Deadline]] = []
        for pipeline in self.allowed(exchange):
            timeout_s = timeout_of(pipeline)
            if timeout_s is None:
                continue
            deadline = deadline_of(exchange, timeout_s)
            admission = self.target_of(pipeline).admission
            if admission.admits(exchange.caller, deadline):
                return
            refusing.append((admission, deadline))
        if refusing:
            admission, deadline = choice(refusing)  # spreads the reserved retry times over the pipelines
            admission.check(exchange.caller, deadline)

    async def take_slot(self, call: InferenceCall) -> Slot:
        """A slot for the call, maybe after a wait in the queue. Raises TooManyRequests or DeadlineExceeded."""
        admission, record = call.target.admission, call.record
        slot = admission.try_enter(call.caller)
        if slot is None:
            started = time.perf_counter()
            try:
                slot = await admission.enter(call.caller, call.deadline)
            finally:
                record.queue_s = time.perf_counter() - started
        self.metrics.of_pipeline(admission.name).queue_time.observe(record.queue_s)
        return slot

    def limits_of(self, pipeline: Pipeline) -> dict[str, Any]:
        """For the catalog. ``in_flight`` is the number now; ``adapts``: whether it follows what is measured."""
        admission = self.target_of(pipeline).admission
        given = admission.limits
        return {
            "in_flight": admission.model_queue.limit.value,
            "adapts": pipeline.spec.model not in self.catalog.oip_models.in_flight,
            "queue": admission.own.max_waiting,
            "per_key": given.per_key,
        }

    def show_load(self) -> None:
        """Brings the gauges of admission up to date."""
        admissions = self.admission.pipelines.values()
        unary = self.workload.unary_requests()
        in_flight = {each.name: unary[each.name] for each in admissions}
        load = Counter[str](), Counter[str]()
        for admission in admissions:
            for counted, count in zip(load, (admission.own.running, admission.own.waiting), strict=True):
                counted[admission.name] += count
        limits = {each.model: each.limit.value for each in self.admission.model_queues.values()}
        self.metrics.show_load(in_flight, *load, limits)

    async def answer(self, call: InferenceCall) -> Ending:
        """One unary answer. Also calls the target's ``cancel`` model if the gateway ends the request early."""
        slot, record = await self.take_slot(call), call.record
        record.triton_request_id = call.inference.request_id
        started = record.triton_at = time.perf_counter()
        try:
            if call.batch is None:
                with slot:
                    ending = await self._run(slot, call)
            else:
                ending = await self._run_parts(slot, call, call.batch)
        finally:
            record.triton_s = time.perf_counter() - started
        record.exit_early(ending.early_exit)
        return ending

    async def _run_parts(self, first: Slot, call: InferenceCall, batch: Batch) -> Ending:
        async def run_part(slot: Slot, part: BatchPart) -> None:
            await self._run(slot, replace(call, inference=part.request, answer=part.answer, batch=None))

        await self._runner_of(call, batch, run_part).run(first)
        return batch.finish()

    def _runner_of(self, call: InferenceCall, batch: Batch, work: Work) -> PartRunner:
        parts = self.metrics.of_pipeline(call.target.name).parts

        def counted(slot: Slot, part: BatchPart) -> Awaitable[None]:
            parts.inc()
            return work(slot, part)

        counted_work = counted if batch.has_several else work
        return PartRunner(call.target.admission, call.caller, call.deadline, batch, counted_work)

    async def _run(self, slot: Slot, call: InferenceCall) -> Ending:
        target, is_abandoned = call.target, False
        requests = _prepared(call, call.record.trace)
        try:
            responded = slot.output if target.decoupled else None
            return await run(self.engine, requests, call.deadline, call.answer, responded)
        except (asyncio.CancelledError, DeadlineExceeded, ContractViolation):
            is_abandoned = True
            raise
        finally:
            if requests[0].shared is not None:
                _note_sharing(call.record, requests[0].shared)
            if (tokens := call.answer.tokens) is not None:
                call.record.add_tokens(tokens)
            if is_abandoned or call.answer.has_enough:
                call.abandon()

    async def open_stream(self, call: InferenceCall, log: EventLog | None = None) -> tuple[Stream, list[Event]]:
        """A started stream and its first events, none if it is still silent after ``commit_s``.

        ``log``: where it writes its events; None for a new log.

        Raises the error of a stream that failed before its first output: it still gets an HTTP status.
        """
        slot = await self.take_slot(call)
        stream = Stream(self._plan_of(call, slot, StreamRecorder(self, call, slot)), log)
        self._start(stream, call.target.name)
        try:
            opening = await _first_events(stream, call.target.stream.commit_s if call.target.commits else None)
        except asyncio.CancelledError:
            stream.end(ClientClosedRequest("The client went away before the first output."))
            raise
        if opening and opening[0].name == "error" and stream.error is not None:
            raise stream.error
        return stream, opening

    async def start_resumable(self, call: InferenceCall, store: StreamStore, slot: Slot, start: StartKey | None) -> str:
        """The id of a new stream that outlives its POST. It is counted and logged when it ends, not with the POST.

        ``slot``: its slot, which it gives back when it ends. ``start``: its claimed idempotency key.

        Raises TooManyRequests if the store is full, UpstreamUnavailable if it does not answer: then nothing was
        started, and the POST is counted.
        """
        posted, call = call.record, replace(call, record=call.record.handed_over())
        stream = Stream(self._plan_of(call, slot, ResumableRecorder(self, call, slot)), store.new_log())
        try:
            stream_id = await store.keep(stream, call.target.stream.resume_s, call.record.key, start)
        except BaseException as exc:
            slot.leave(exc)
            if isinstance(exc, GatewayError):
                posted.take_back(call.record)
            raise
        self._start(stream, call.target.name)
        return stream_id

    def _plan_of(self, call: InferenceCall, slot: Slot, recorder: "StreamRecorder") -> StreamPlan:
        record, target = call.record, call.target
        record.triton_request_id, record.triton_at = call.inference.request_id, time.perf_counter()
        return StreamPlan(
            request_id=record.request_id,
            responses=self._responses_of(call, slot, recorder.span.trace),
            answer=call.answer,
            deadline=call.deadline,
            first_s=target.stream.longest_first_s,
            progress_s=target.stream.progress_s,
            lag_s=target.stream.lag_s,
            problem_of=call.problem_of,
            observer=recorder,
        )

    def _responses_of(
        self, call: InferenceCall, slot: Slot, trace: TraceContext | None
    ) -> AsyncGenerator[InferenceResponse]:
        decoupled = call.target.decoupled
        if call.batch is None:
            return responses_of(self.engine, _prepared(call, trace), call.deadline, decoupled=decoupled)

        def responses(request: InferenceRequest) -> AsyncGenerator[InferenceResponse]:
            part = replace(call, inference=request)
            return responses_of(self.engine, _prepared(part, trace), call.deadline, decoupled=decoupled)

        streams = PartStreams(responses, call.target.abandon)
        return streams.responses(self._runner_of(call, call.batch, streams.read), slot)

    def _start(self, stream: Stream, pipeline: str) -> None:
        """Starts the stream, which counts as work until its terminal event is written."""
        active = self.metrics.of_pipeline(pipeline).active_streams

        def forget(_task: asyncio.Task[None]) -> None:
            self.workload.remove(stream)
            active.dec()

        self.workload.add(stream)
        active.inc()
        stream.start().add_done_callback(forget)


def _note_sharing(record: RequestRecord, shared: SharedCall) -> None:
    """Notes the call that the request shared, whose id is the one that Triton knows."""
    if shared.requests:
        record.triton_request_id, record.shared_with = shared.request_id, shared.requests - 1
        record.shared_trace = shared.trace


def _prepared(call: InferenceCall, trace: TraceContext | None) -> list[InferenceRequest]:
    return [call.target.prepared(each, call.deadline).with_trace(trace) for each in (call.inference, *call.further)]


async def _first_events(stream: Stream, commit_s: float | None) -> list[Event]:
    try:
        async with asyncio.timeout(commit_s):
            return await stream.log.read(0)
    except TimeoutError:
        return []


class StreamRecorder:
    """Tells metrics, trace, record and admission what happens to one stream. Implements StreamObserver.

    ``slot``: the stream's slot, which it gives back.
    """

    def __init__(self, inference: Inference, call: InferenceCall, slot: Slot) -> None:
        name, record = call.target.name, call.record
        self._slot = slot
        self._counts_outputs = call.batch is None
        """Each part of a batch has its own slot, which knows its outputs."""
        self._inference = inference
        self._record = record
        without_inputs = [each.without_inputs() for each in call.further]
        self._abandon = replace(call, inference=call.inference.without_inputs(), further=without_inputs).abandon
        self.span = inference.tracer.start(f"stream {name}", SpanKind.INTERNAL, record.trace)
        metrics = inference.metrics.of_pipeline(name)
        self._answer, self._metrics = call.answer, metrics
        self._first, self._gap, self._count = metrics.time_to_first_output, metrics.inter_output, metrics.stream_outputs
        self._first_at = self._last_at = record.started
        self._has_output = False

    def responded(self) -> None:
        if self._counts_outputs:
            self._slot.output()

    def output_written(self) -> None:
        now = time.perf_counter()
        if self._has_output:
            self._gap.observe(now - self._last_at)
        else:
            self._first.observe(now - self._last_at)
            self._first_at, self._has_output = now, True
        self._last_at = now
        self._count.inc()

    def abandoned(self) -> None:
        self._abandon()

    def ended(self, stream: Stream) -> None:
        end_stream_span(
            self.span, outputs=stream.outputs, outcome=stream.outcome, error=stream.error, early_exit=stream.early_exit
        )
        record = self._record
        record.triton_s = max(record.duration_s - stream.own_s - record.queue_s, 0.0)
        record.stream_ended = time.perf_counter()
        record.exit_early(stream.early_exit)
        if (tokens := self._answer.tokens) is not None:
            self._count_tokens(tokens)
        if stream.error is not None:
            record.fail(stream.error)
        self._slot.leave(stream.error)

    def _count_tokens(self, tokens: Tokens) -> None:
        self._record.add_tokens(tokens)
        if tokens.completion > 1:
            seconds = (self._last_at - self._first_at) / (tokens.completion - 1)
            self._metrics.time_per_output_token.observe(seconds)


class ResumableRecorder(StreamRecorder):
    """For a stream whose request has been answered already: the end of the stream also closes its record."""

    def ended(self, stream: Stream) -> None:
        super().ended(stream)
        self._record.close(self._inference.metrics)
