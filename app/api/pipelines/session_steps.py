"""Opens the sessions of pipelines, and runs their steps: each is a request of one sequence in Triton."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from time import monotonic

from msgspec import Struct

from app.api.call import Inference, InferenceCall
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.pipelines.results import body_of_values, rendered
from app.api.problems import problem_of
from app.core.answer import Answer, Ending
from app.core.errors import ClientClosedRequest, DeadlineExceeded, GatewayError, InvalidRequest
from app.core.inference import Deadline, InferenceRequest
from app.core.json import json_of
from app.core.share import Share
from app.core.trace import TraceContext
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector, WholeAnswer
from app.sessions.places import SessionOwner
from app.sessions.registry import Sessions
from app.sessions.session import End, PipelineSession, SessionStep, StepAnswer
from app.streams.events import Event, LiveLog

_log = logging.getLogger("triton_gateway.session")


class StepCall(InferenceCall, eq=False, kw_only=True):
    session: PipelineSession

    def prepared(self, request: InferenceRequest, trace: TraceContext | None) -> InferenceRequest:
        """Makes the request the running step of the session's sequence."""
        return self.session.prepared(super().prepared(request, trace))


class StepRequest(Struct):
    """A step as its caller sends it. ``waiting``: is open while the caller waits for the answer."""

    exchange: Exchange
    record: RequestRecord
    session: PipelineSession
    read: Callable[[Deadline], Awaitable[InferenceRequest]]
    number: int | None = None
    is_last: bool = False
    waiting: CancelledOnDisconnect | nullcontext[None] = nullcontext()


class SessionSteps(Sessions):
    """The sessions of this process, over HTTP and WebSockets."""

    def __init__(self, inference: Inference, share: Share) -> None:
        super().__init__(inference.catalog.engine, share)
        self._inference = inference

    def _note_open(self, session: PipelineSession) -> None:
        self._inference.workload.add(session)
        self._inference.metrics.sessions.opened(session.pipeline.name)

    def _note_end(self, session: PipelineSession, reason: End) -> None:
        self._inference.metrics.sessions.ended(session.pipeline.name, reason)
        fields = {
            "pipeline": session.pipeline.name,
            "reason": str(reason),
            "steps": session.steps,
            "duration_s": round(monotonic() - session.opened_at, 3),
            "key": session.owner,
        }
        _log.log(logging.WARNING if reason is End.LOST else logging.INFO, "session ended", extra=fields)

    def _note_left(self, session: PipelineSession) -> None:
        self._inference.workload.remove(session)

    def opened(self, exchange: Exchange, pipeline: Pipeline) -> PipelineSession:
        """Opens a session in this process.

        Raises InvalidRequest, TooManyRequests or ModelNotReady.
        """
        if pipeline.session is None:
            raise InvalidRequest(
                f"This pipeline has no sessions: POST /v1/pipelines/{pipeline.name} runs a request.",
                hint="An operator can declare `session: true` for a model with `sequence_batching` in gateway.yaml.",
            )
        owner = SessionOwner(exchange.caller.id, exchange.caller.limits.sessions)
        return self.open(pipeline, self._inference.admission_of(pipeline), owner)

    async def answer(self, step: StepRequest) -> StepAnswer:
        """Runs a step, and returns its whole answer."""
        session, pipeline = step.session, step.session.pipeline
        deadline = deadline_of(step.exchange, min(pipeline.timeout_s, session.terms.reach_s))
        request = (await step.read(deadline)).owned()

        async def run() -> StepAnswer:
            call = self._call(step, request, WholeAnswer(pipeline, request))
            ending = await self._inference.answer(call)
            values, _ = rendered(pipeline, ending)
            return StepAnswer(await body_of_values(values), ending.early_exit)

        with step.waiting:
            answer = await session.step(SessionStep(step.number, step.is_last, deadline, run))
        step.record.exit_early(answer.early_exit)
        return answer

    async def stream(self, step: StepRequest) -> "StepStream":
        """Begins a step whose answer is a stream. Raises InvalidRequest if the pipeline does not stream."""
        session, pipeline = step.session, step.session.pipeline
        deadline = deadline_of(step.exchange, min(pipeline.stream_spec().timeout_s, session.terms.reach_s))
        request = (await step.read(deadline)).owned()
        call = self._call(step, request, StepCollector(pipeline, request, session))
        stream = StepStream(self._inference, call, deadline)
        with step.waiting:
            await stream.open(step.number, is_last=step.is_last)
        return stream

    def _call(self, step: StepRequest, request: InferenceRequest, answer: Answer) -> StepCall:
        """Runs longer than the caller waits, but not longer than Triton knows the sequence."""
        session = step.session
        claim, deadline = session.admission.claim_of(step.exchange.caller), Deadline.after(session.terms.triton_idle_s)
        call = StepCall(session.pipeline, claim, deadline, step.record, session=session)
        call.requests, call.answer = [request], answer
        return call


class LeavableLog(LiveLog):
    """Drops all events after :meth:`end`."""

    def __init__(self) -> None:
        super().__init__()
        self._last_id = 0
        self.has_ended = False

    @property
    def is_full(self) -> bool:
        return not self.has_ended and super().is_full

    def append(self, event: Event) -> None:
        if not self.has_ended:
            self._last_id, self.has_ended = event.id, event.is_terminal
            super().append(event)

    def end(self, problem: bytes) -> None:
        """Adds the terminal event ``error`` for a reader that leaves. No-op after another terminal event."""
        self.append(Event(self._last_id + 1, "error", problem))


class StepCollector(Collector):
    """The answer of a streamed step."""

    def __init__(self, pipeline: Pipeline, request: InferenceRequest, session: PipelineSession) -> None:
        super().__init__(pipeline, request)
        self._session = session

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises SessionLost, and the errors of :meth:`Collector.finish`."""
        return super().finish(None if error is None else self._session.error_of_stream(error))


class StepStream:
    """One step as a stream. Its caller may leave; the step runs to its end. ``deadline``: of the caller."""

    def __init__(self, inference: Inference, call: StepCall, deadline: Deadline) -> None:
        self._inference = inference
        self._call = call
        self._deadline = deadline
        self._begun = asyncio.get_running_loop().create_future()
        self.opening: Sequence[Event] = ()
        """The first events; none if the model is silent for ``commit_s``."""
        self.log = LeavableLog()
        self.number = 0
        """Of the step, when it has begun."""

    async def open(self, number: int | None, *, is_last: bool) -> None:
        """Raises the errors of :meth:`PipelineSession.begin`."""
        try:
            await self._call.session.begin(SessionStep(number, is_last, self._deadline, self._run), self._begun)
        except BaseException:
            self.log.end(b"{}")  # nobody reads it
            raise

    def leave(self, cause: GatewayError) -> None:
        """Ends the events with an error; the step goes on. No-op if the events have ended."""
        if not self.log.has_ended:
            record = self._call.record
            record.fail(cause)
            self.log.end(json_of(problem_of(cause, record.request_id)))

    async def left(self) -> None:
        """Call it when nobody reads the events any more."""
        self.leave(ClientClosedRequest("The client left before the end of the step."))

    async def _run(self) -> StepAnswer:
        """Returns when the model has sent its last response."""
        session = self._call.session
        self.number = session.steps + 1
        self._call.deadline = Deadline.after(session.terms.triton_idle_s)
        stream, self.opening = await self._inference.open_stream(self._call, self.log)
        late = DeadlineExceeded("The deadline passed. The step runs to its end, and its outputs are dropped.")
        timer = asyncio.get_running_loop().call_later(self._deadline.remaining_s(), self.leave, late)
        self._begun.set_result(None)
        try:
            await stream.ended()
        finally:
            timer.cancel()
        if stream.error is not None:
            raise stream.error
        return StepAnswer(b"", stream.early_exit)
