"""Runs the calls of all dialects and opens their streams, and writes what happened on each request's record."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from random import choice

from msgspec import Struct
from msgspec.structs import replace

from app.admission.admission import Admission
from app.admission.scheduler import Claim, PipelineAdmission, Slot
from app.api.error_table import problem_of
from app.api.exchange import Exchange, Workload, check_pipeline
from app.core.aio import BackgroundTasks
from app.core.answer import Answer, Batch, BatchPart, Ending, PartEnd
from app.core.engine import Engine, Put, discard_stream, merged, responses_of
from app.core.errors import ClientClosedRequest, ContractViolation, DeadlineExceeded, GatewayError
from app.core.inference import BYTES, Deadline, InferenceRequest, InferenceResponse, Tensor, TraceContext, bytes_array
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import Tracer, end_stream_span
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline, Target
from app.pipelines.run import run
from app.streams.store import StreamStore
from app.streams.stream import Event, EventLog, LiveLog, ProblemOf, Stream

CANCEL_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class InferenceCall(Struct, eq=False):
    """An admitted call of a pipeline, or of a model by its own name."""

    target: Target
    claim: Claim
    """On the slots of its model, for its caller."""
    deadline: Deadline
    record: RequestRecord
    requests: Sequence[InferenceRequest] = ()
    """They run at the same time and in the same slot. Each part of a :class:`Batch` takes its own slot."""
    answer: Answer = Answer()
    problem_of: ProblemOf = problem_of
    """The data of a stream's terminal error."""

    def prepared(self, request: InferenceRequest, trace: TraceContext | None) -> InferenceRequest:
        """The request as it is sent."""
        name = self.target.spec.deadline_parameter
        if name is not None:  # Triton tells no step the deadline
            expires_at_ms = round((time.time() + self.deadline.remaining_s()) * 1000)
            request = replace(request, parameters={**request.parameters, name: expires_at_ms})
        for layer in self.target.layers:
            request = layer.extended(request)
            self.record.steps = request.steps
        return request if trace is request.trace else replace(request, trace=trace)


@dataclass(slots=True)
class Inference:
    """Every inference of the API: its admission, its run, its metrics and its trace."""

    engine: Engine
    catalog: Catalog
    metrics: Metrics
    tracer: Tracer = None
    workload: Workload = field(default_factory=Workload)
    admission: Admission = field(default_factory=Admission)
    admitted: Sequence[Callable[[Exchange, Pipeline], None]] = ()
    """Are called with each admitted request."""
    direct: Engine | None = None
    """The engine without its layers, for requests without extensions."""
    cancellations: BackgroundTasks = field(default_factory=BackgroundTasks)
    """The running calls of ``cancel`` models."""
    _admissions: dict[tuple[str, str], tuple[Target, Mapping[str, int], PipelineAdmission]] = field(
        default_factory=dict
    )

    def admit(self, exchange: Exchange, name: str, transport: str | None) -> Pipeline:
        """The pipeline. The request counts as work, under the pipeline's name, until its last byte is sent.

        ``transport``: None for a request that does not run inference.

        Raises Forbidden, Draining, UnknownPipeline or ModelNotReady.
        """
        record = exchange.record
        record.transport = transport
        if exchange.key.pipelines is not None:
            check_pipeline(exchange, self.catalog, name)
        pipeline = self.catalog.pipeline(name)
        record.pipeline = name
        self.workload.begin(exchange)
        for admitted in self.admitted:
            admitted(exchange, pipeline)
        return pipeline

    def admission_of(self, target: Target) -> PipelineAdmission:
        """The admission with the limits of ``target``, which are read again if they or those of its model changed.

        All calls of a model use the same queue.
        """
        name, model, in_flight = target.name, target.spec.model, self.catalog.oip_models.in_flight
        known = self._admissions.get((name, model))
        if known is None or known[0] is not target or known[1] is not in_flight:
            admission, own = self.admission.of(name, model, target.capacity, in_flight.get(model)), target.spec.limits
            admission.set_limits(*(() if own is None else (own.in_flight, own.queue, own.per_key)))
            known = self._admissions[name, model] = target, in_flight, admission
        return known[2]

    def begin(self, exchange: Exchange, target: Target, timeout_s: float) -> InferenceCall:
        """Starts the deadline, which includes the time to receive the body. Call it before the body is read.

        Raises InvalidRequest, or TooManyRequests if no slot is free or expected soon.
        """
        deadline, claim = exchange.deadline(timeout_s), self.admission_of(target).claim_of(exchange.key)
        claim.check(deadline)
        return InferenceCall(target, claim, deadline, exchange.record)

    def call(self, exchange: Exchange, target: Target, deadline: Deadline) -> InferenceCall:
        return InferenceCall(target, self.admission_of(target).claim_of(exchange.key), deadline, exchange.record)

    def allowed(self, exchange: Exchange) -> Iterator[Pipeline]:
        """The pipelines that can be called, of those that the caller's key allows."""
        for name, entry in self.catalog.entries.items():
            if (pipeline := entry.pipeline) is not None and exchange.key.allows(name):
                yield pipeline

    def check_load_of_any(self, exchange: Exchange, timeout_of: Callable[[Pipeline], float | None]) -> None:
        """Raises TooManyRequests if the request would be refused now, whichever pipeline its body names.

        Call it before the body is read. ``timeout_of``: the longest deadline, in seconds, of a request to a pipeline;
        None if the body cannot name that pipeline.
        """
        refusing: list[InferenceCall] = []
        for pipeline in self.allowed(exchange):
            timeout_s = timeout_of(pipeline)
            if timeout_s is None:
                continue
            call = self.call(exchange, pipeline, exchange.deadline(timeout_s))
            if call.claim.admits(call.deadline):
                return
            refusing.append(call)
        if refusing:
            call = choice(refusing)  # spreads the reserved retry times over the pipelines
            call.claim.check(call.deadline)

    async def take_slot(self, call: InferenceCall) -> Slot:
        """A slot for the call, maybe after a wait in the queue. Raises TooManyRequests or DeadlineExceeded."""
        record, slot = call.record, call.claim.try_enter()
        if slot is None:
            started = time.perf_counter()
            try:
                slot = await call.claim.enter(call.deadline)
            finally:
                record.queue_s = time.perf_counter() - started
        self.metrics.of_pipeline(call.target.name).queue_time.observe(record.queue_s)
        return slot

    def show_load(self) -> None:
        """Brings the gauges of admission up to date."""
        admissions = self.admission.pipelines.values()
        records = [work.record for work in self.workload.running if isinstance(work, Exchange)]
        unary = Counter(record.pipeline for record in records if record.transport == "unary")
        in_flight = {each.name: unary[each.name] for each in admissions}
        running, waiting = Counter[str](), Counter[str]()
        for each in admissions:
            running[each.name] += each.own.running
            waiting[each.name] += each.own.waiting
        limits = {each.model: each.limit.value for each in self.admission.model_queues.values()}
        self.metrics.show_load(in_flight, running, waiting, limits)

    async def answer(self, call: InferenceCall) -> Ending:
        """One unary answer. Also calls the target's ``cancel`` model if the gateway ends the request early."""
        slot, record, answer = await self.take_slot(call), call.record, call.answer
        request = call.requests[0]
        record.triton_request_id = request.request_id
        started = record.triton_at = time.perf_counter()
        try:
            if call.target.config.decoupled or len(call.requests) > 1 or isinstance(answer, Batch):
                responses = self.responses_of(call, slot, record.trace, may_share=True)
                counts = call.target.config.decoupled and not isinstance(answer, Batch)
                ending = await run(answer, responses, slot.output if counts else None)
            else:
                request = call.prepared(request, record.trace)
                engine = self.direct if self.direct is not None and not request.extensions else self.engine
                ending = await run(answer, engine.infer(request, call.deadline))
        except BaseException as exc:
            slot.leave(exc)
            if isinstance(exc, asyncio.CancelledError | DeadlineExceeded | ContractViolation):
                self.abandon(call)
            raise
        else:
            slot.leave()
        finally:
            record.triton_s = time.perf_counter() - started
            if request.extensions:
                _note_sending(record, request)
            if (tokens := answer.tokens) is not None:
                record.add_tokens(tokens)
        if answer.has_enough:
            self.abandon(call)
        if ending.early_exit is not None:
            record.exit_early(ending.early_exit)
        return ending

    def abandon(self, call: InferenceCall, part: InferenceRequest | None = None) -> None:
        """Makes the model stop, if the pipeline declares a ``cancel`` model. A batch is stopped part by part.

        That model stops a step of an ensemble, because Triton does not pass a cancellation on to the steps.
        """
        hook, requests = call.target.spec.cancel, () if isinstance(call.answer, Batch) else call.requests
        if hook is None:
            return

        async def cancel(request_id: str) -> None:
            tensor = Tensor(hook.input, BYTES, bytes_array([request_id.encode()], (1,)))
            request = InferenceRequest(hook.model, (tensor,), about=request_id)
            engine = self.engine if self.direct is None else self.direct
            try:
                await discard_stream(engine, request, Deadline.after(CANCEL_TIMEOUT_S))
            except GatewayError as exc:
                _log.warning("cancel call to model '%s' failed: %s", hook.model, exc.detail)

        for request in requests if part is None else (part,):
            self.cancellations.start(cancel(request.request_id))

    async def open_stream(self, call: InferenceCall, log: EventLog | None = None) -> tuple[Stream, list[Event]]:
        """A started stream and its first events, none if it is still silent after ``commit_s``.

        ``log``: where it writes its events; None for a new log.

        Raises the error of a stream that failed before its first output: it still gets an HTTP status.
        """
        stream = RecordedStream(self, call, await self.take_slot(call), log or LiveLog())
        self._start(stream, call.target.name)
        opening: list[Event] = []
        try:
            async with asyncio.timeout(call.target.stream_terms.commit_s):
                opening = await stream.log.read(0)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            stream.end(ClientClosedRequest("The client went away before the first output."))
            raise
        if opening and opening[0].name == "error" and stream.error is not None:
            raise stream.error
        return stream, opening

    async def start_resumable(self, call: InferenceCall, slot: Slot, store: StreamStore) -> str:
        """The id of a new stream that outlives its POST. It is counted and logged when it ends, not with the POST.

        ``slot``: its slot, which it gives back when it ends.

        Raises TooManyRequests if the store is full, UpstreamUnavailable if it does not answer: then nothing was
        started, and the POST is counted.
        """
        posted, call = call.record, replace(call, record=replace(call.record))
        stream = RecordedStream(self, call, slot, store.new_log(), is_resumable=True)
        try:
            stream_id = await store.keep(stream, call.target.stream_terms.resume_s, call.record.key)
        except BaseException as exc:
            slot.leave(exc)
            raise
        posted.transport = posted.on_end = None
        self._start(stream, call.target.name)
        return stream_id

    def responses_of(
        self, call: InferenceCall, slot: Slot, trace: TraceContext | None, *, may_share: bool = False
    ) -> AsyncGenerator[InferenceResponse]:
        """The responses of all requests, or of the parts of a batch. ``may_share``: parts may share calls."""
        batch, decoupled = call.answer, call.target.config.decoupled
        if not isinstance(batch, Batch):
            requests = [call.prepared(each, trace) for each in call.requests]
            return responses_of(self.engine, requests, call.deadline, decoupled=decoupled)
        runner = PartRunner(self, call, batch, trace, may_share=may_share and not decoupled)
        return merged(partial(runner.run, slot))

    def _start(self, stream: Stream, pipeline: str) -> None:
        """Starts the stream, which counts as work until its terminal event is written."""
        self.workload.add(stream)
        self.metrics.of_pipeline(pipeline).active_streams.inc()
        stream.start()


def _note_sending(record: RequestRecord, request: InferenceRequest) -> None:
    """Notes how a layer sent the request, if it had no call of its own."""
    for extension in request.extensions:
        if (sent_as := extension.sent_as) is not None:
            record.sent_as, record.triton_request_id = sent_as, sent_as.request_id


SMALLEST_SHARE = 2
"""Parts that may always run at the same time: the model computes one while the gateway sends the next."""


@dataclass(slots=True)
class _Lane:
    """Runs parts one after the other. ``slot``: that of its current part; None while it waits for its turn."""

    slot: Slot | None

    def ended(self, task: asyncio.Task[None]) -> None:
        if self.slot is not None:
            self.slot.leave(asyncio.CancelledError() if task.cancelled() else task.exception())


class PartRunner:
    """Runs the parts of one request: in all slots of the model while no other request needs one, otherwise in half.

    The first part waits for a slot. Others start while slots are free and no other request waits. If requests wait when
    a part ends, its slot goes to them, and the next part waits for its turn. A slot above the share becomes free.
    """

    def __init__(
        self, inference: Inference, call: InferenceCall, batch: Batch, trace: TraceContext | None, *, may_share: bool
    ) -> None:
        """``may_share``: parts may share calls with other requests."""
        self._inference, self._call, self._trace, self._may_share = inference, call, trace, may_share
        self._count = inference.metrics.of_pipeline(call.target.name).parts if len(batch) > 1 else None
        self._parts, self._waiting = batch.parts(), len(batch)
        self._lanes, self._group = 0, asyncio.TaskGroup()

    async def run(self, first: Slot, put: Put) -> None:
        """Puts the responses of all parts, and leaves all slots. ``first``: the slot of the first part.

        Raises TooManyRequests or DeadlineExceeded, in a group, if the turn of a part comes too late.
        """
        self._put = put
        async with self._group:
            self._start(first)
            self._start_more()

    def _start_more(self) -> None:
        while self._waiting and self._lanes < self._share:
            slot = self._call.claim.try_enter()
            if slot is None:
                return
            self._start(slot)

    @property
    def _share(self) -> int:
        """How many parts may run now."""
        queue = self._call.claim.model_queue
        is_alone = queue.running <= self._lanes and not queue.has_waiters
        return max(queue.limit.value if is_alone else queue.limit.value // 2, SMALLEST_SHARE)

    def _start(self, slot: Slot) -> None:
        self._lanes += 1
        lane = _Lane(slot)
        self._waiting -= 1
        self._group.create_task(self._run(lane, next(self._parts))).add_done_callback(lane.ended)

    async def _run(self, lane: _Lane, part: BatchPart) -> None:
        claim = self._call.claim
        while True:
            if lane.slot is None:
                lane.slot = await claim.enter_again(self._call.deadline)
            slot, error = lane.slot, await self._read(lane.slot, part)
            is_last = not self._waiting or self._lanes > self._share
            if is_last or error is not None or claim.model_queue.has_waiters:
                slot.leave(error)
                lane.slot = None
            if is_last:
                self._lanes -= 1
                return
            self._waiting -= 1
            part = next(self._parts)
            if lane.slot is not None:
                slot.answered()
                self._start_more()

    async def _read(self, slot: Slot, part: BatchPart) -> GatewayError | None:
        """Reads a part to its end, or to its error, which its last response has. Returns the error."""
        call, engine, first = self._call, self._inference.engine, part.items.start
        request, end = call.prepared(part.request, self._trace), PartEnd({}, choice=first)
        if self._count is not None:
            self._count.inc()
        try:
            if self._may_share:
                only = await engine.infer(request, call.deadline)
                end = PartEnd(only.outputs, version=only.version, choice=first)
            else:
                responses = responses_of(engine, [request], call.deadline, decoupled=call.target.config.decoupled)
                async with aclosing(responses):
                    async for response in responses:
                        slot.output()
                        await self._put(replace(response, choice=first, is_final=False))
        except asyncio.CancelledError:
            self._inference.abandon(call, request)
            raise
        except GatewayError as exc:
            if isinstance(exc, DeadlineExceeded):
                self._inference.abandon(call, request)
            end = PartEnd({}, choice=first, error=exc)
        finally:
            _note_sending(call.record, request)
        await self._put(end)
        return end.error


class RecordedStream(Stream):
    """Tells metrics, trace, record and admission what happens to it.

    ``slot``: the stream's slot, which it gives back. Each part of a batch has its own, which knows its outputs.
    ``is_resumable``: its request has been answered already: the end of the stream also closes its record.
    """

    def __init__(
        self, inference: Inference, call: InferenceCall, slot: Slot, log: EventLog, *, is_resumable: bool = False
    ) -> None:
        target, record = call.target, call.record
        self._inference, self._call, self._record, self._slot = inference, call, record, slot
        self._is_resumable = is_resumable
        record.triton_request_id, record.triton_at = call.requests[0].request_id, time.perf_counter()
        tracer = inference.tracer
        self.span = None if tracer is None else tracer.start(f"stream {target.name}", "INTERNAL", record.trace)
        super().__init__(
            request_id=record.request_id,
            responses=inference.responses_of(call, slot, record.trace if self.span is None else self.span.trace),
            answer=call.answer,
            deadline=call.deadline,
            first_s=target.stream_terms.longest_first_s,
            progress_s=target.stream_terms.progress_s,
            lag_s=target.stream_terms.lag_s,
            problem_of=call.problem_of,
            on_response=(lambda: None) if isinstance(call.answer, Batch) else slot.output,
            log=log,
        )
        call.requests = [each.without_inputs() for each in call.requests]
        metrics = inference.metrics.of_pipeline(target.name)
        self._metrics = metrics
        self._first, self._gap, self._count = metrics.time_to_first_output, metrics.inter_output, metrics.stream_outputs
        self._first_at = self._last_at = record.started

    def on_output(self) -> None:
        now = time.perf_counter()
        if self.outputs > 1:
            self._gap.observe(now - self._last_at)
        else:
            self._first.observe(now - self._last_at)
            self._first_at = now
        self._last_at = now
        self._count.inc()

    def on_abandoned(self) -> None:
        self._inference.abandon(self._call)

    def on_end(self) -> None:
        if self.span is not None:
            end_stream_span(
                self.span, outputs=self.outputs, outcome=self.outcome, error=self.error, early_exit=self.early_exit
            )
        record = self._record
        record.triton_s = max(record.duration_s - self.own_s - record.queue_s, 0.0)
        record.stream_ended = time.perf_counter()
        record.exit_early(self.early_exit)
        if (tokens := self.answer.tokens) is not None:
            record.add_tokens(tokens)
            if tokens.completion > 1:
                seconds = (self._last_at - self._first_at) / (tokens.completion - 1)
                self._metrics.time_per_output_token.observe(seconds)
        if self.error is not None:
            record.fail(self.error)
        self._slot.leave(self.error)
        self._inference.workload.remove(self)
        self._metrics.active_streams.dec()
        if self._is_resumable:
            record.close(self._inference.metrics)
