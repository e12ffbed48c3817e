"""Runs the steps of sessions: each is a request of one sequence in Triton."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from msgspec import Struct

from app.api.call import Inference, InferenceCall
from app.api.exchange import CancelledOnDisconnect, Exchange
from app.api.pipelines.results import body_of_values, rendered
from app.api.problems import problem_of
from app.api.sessions.open_sessions import OpenSession
from app.core.answer import Answer, Ending
from app.core.errors import ClientClosedRequest, DeadlineExceeded, GatewayError, Unavailable
from app.core.inference import Deadline, InferenceRequest
from app.core.json import json_of
from app.core.trace import TraceContext
from app.observability.record import RequestRecord
from app.pipelines.run import Collector, WholeAnswer
from app.sessions.session import SessionStep, StepAnswer
from app.streams.events import Event, LiveLog


class StepRequest(Struct):
    """A step as its caller sends it. ``waiting``: is open while the caller waits for the answer."""

    exchange: Exchange
    record: RequestRecord
    session: OpenSession
    read: Callable[[Deadline], Awaitable[InferenceRequest]]
    number: int | None = None
    is_last: bool = False
    waiting: CancelledOnDisconnect | nullcontext[None] = nullcontext()

    async def answer(self, inference: Inference) -> StepAnswer:
        """Runs the step, and returns its whole answer."""
        session, pipeline = self.session, self.session.pipeline
        deadline = self.exchange.deadline(min(pipeline.timeout_s, session.terms.reach_s))
        request = (await self.read(deadline)).owned()

        async def run() -> StepAnswer:
            ending = await inference.answer(self._call(request, WholeAnswer(pipeline, request)))
            return StepAnswer(await body_of_values(rendered(pipeline, ending)[0]), ending.early_exit)

        with self.waiting:
            answer = await session.step(SessionStep(self.number, self.is_last, deadline, run))
        self.record.exit_early(answer.early_exit)
        return answer

    async def stream(self, inference: Inference) -> "StepStream":
        """Begins a step whose answer is a stream. Raises InvalidRequest if the pipeline does not stream."""
        session, pipeline = self.session, self.session.pipeline
        timeout_s = pipeline.stream_spec("/v1/sessions/{id}").timeout_s
        deadline = self.exchange.deadline(min(timeout_s, session.terms.reach_s))
        request = (await self.read(deadline)).owned()
        call = self._call(request, StepCollector(session, request))
        stream = StepStream(inference, call, deadline)
        step = SessionStep(self.number, self.is_last, deadline, stream.run)
        try:
            with self.waiting:
                await session.step(step, stream.begun)
        except BaseException:
            stream.log.end(b"{}")  # nobody reads it
            raise
        return stream

    def _call(self, request: InferenceRequest, answer: Answer) -> "StepCall":
        """Runs longer than the caller waits, but not longer than Triton knows the sequence."""
        session = self.session
        claim, deadline = session.admission.claim_of(self.exchange.caller), Deadline.after(session.terms.triton_idle_s)
        return StepCall(session.pipeline, claim, deadline, self.record, [request], answer, session=session)


class StepCall(InferenceCall, eq=False, kw_only=True):
    session: OpenSession

    def prepared(self, request: InferenceRequest, trace: TraceContext | None) -> InferenceRequest:
        """Makes the request the running step of the session's sequence."""
        return self.session.prepared(super().prepared(request, trace))


class StepCollector(Collector):
    """The answer of a streamed step."""

    def __init__(self, session: OpenSession, request: InferenceRequest) -> None:
        super().__init__(session.pipeline, request)
        self._session = session

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises SessionLost if the state is lost, and the errors of :meth:`Collector.finish`."""
        is_sent = not isinstance(error, Unavailable) or error.was_sent
        is_lost = error is not None and is_sent and self._session.sequence.is_lost
        return super().finish(self._session.lost() if is_lost else error)


class LeavableLog(LiveLog):
    """Drops all events after :meth:`end`."""

    last_id = 0
    has_ended = False

    @property
    def is_full(self) -> bool:
        return not self.has_ended and super().is_full

    def append(self, event: Event) -> None:
        if not self.has_ended:
            self.last_id, self.has_ended = event.id, event.is_terminal
            super().append(event)

    def end(self, problem: bytes) -> None:
        """Adds the terminal event ``error`` for a reader that leaves. No-op after another terminal event."""
        self.append(Event(self.last_id + 1, "error", problem))


class StepStream:
    """One step as a stream. Its caller may leave; the step runs to its end. ``deadline``: of the caller."""

    def __init__(self, inference: Inference, call: StepCall, deadline: Deadline) -> None:
        self._inference = inference
        self._call = call
        self._deadline = deadline
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opening: Sequence[Event] = ()
        """The first events; none if the model is silent for ``commit_s``."""
        self.log = LeavableLog()
        self.number = 0
        """Of the step, when it has begun."""

    def leave(self, cause: GatewayError) -> None:
        """Ends the events with an error; the step goes on. No-op if the events have ended."""
        if not self.log.has_ended:
            record = self._call.record
            record.fail(cause)
            self.log.end(json_of(problem_of(cause, record.request_id)))

    async def left(self) -> None:
        """Call it when nobody reads the events any more."""
        self.leave(ClientClosedRequest("The client left before the end of the step."))

    async def run(self) -> StepAnswer:
        """Returns when the model has sent its last response."""
        session = self._call.session
        self.number = session.steps + 1
        self._call.deadline = Deadline.after(session.terms.triton_idle_s)
        stream, self.opening = await self._inference.open_stream(self._call, self.log)
        late = DeadlineExceeded("The deadline passed. The step runs to its end, and its outputs are dropped.")
        timer = asyncio.get_running_loop().call_later(self._deadline.remaining_s(), self.leave, late)
        self.begun.set_result(None)
        try:
            await stream.ended()
        finally:
            timer.cancel()
        if stream.error is not None:
            raise stream.error
        return StepAnswer(b"", stream.early_exit)
