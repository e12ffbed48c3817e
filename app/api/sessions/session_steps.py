"""Runs the steps of sessions: each is a request of one sequence in Triton, sent by POST or as a message."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct, field

from app.api.call import Inference, InferenceCall
from app.api.endpoint import Endpoint
from app.api.error_table import problem_of
from app.api.exchange import Exchange
from app.api.pipelines.pipeline_bodies import body_of_values, read_message, rendered
from app.api.sessions.open_sessions import OpenSession
from app.api.sockets import MessageHandler, Reply
from app.core.answer import Answer, Ending
from app.core.errors import ClientClosedRequest, DeadlineExceeded, GatewayError, Unavailable
from app.core.inference import Deadline, InferenceRequest, TraceContext
from app.core.json import json_of
from app.http1.websocket import Message, Reason, WebSocket
from app.observability.record import RequestRecord
from app.pipelines.run import Collector, WholeAnswer
from app.sessions.session import End, SessionLost, StepAnswer, UnknownSession
from app.streams.events import Event, LiveLog
from app.streams.stream import Done


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
    """Drops all events after the terminal one."""

    last_id = 0
    has_ended = False

    @property
    def is_full(self) -> bool:
        return not self.has_ended and super().is_full

    def append(self, event: Event) -> None:
        if not self.has_ended:
            self.last_id, self.has_ended = event.id, event.is_terminal
            super().append(event)


class StepRequest(Struct, eq=False):
    """A step as its caller sends it. ``waiting``: is open while the caller waits for the answer."""

    inference: Inference
    exchange: Exchange
    record: RequestRecord
    session: OpenSession
    read: Callable[[Deadline], Awaitable[InferenceRequest]]
    number: int | None = None
    is_last: bool = False
    waiting: AbstractContextManager[None] = nullcontext()
    log: LeavableLog = field(default_factory=LeavableLog)
    """The events of a streamed step."""
    opening: Sequence[Event] = ()
    """The first events; none if the model is silent for ``commit_s``."""
    begun_as: int = 0
    """The number of a streamed step."""

    async def answer(self) -> StepAnswer:
        """Runs the step, and returns its whole answer."""
        session, pipeline = self.session, self.session.pipeline
        deadline = self.exchange.deadline(min(pipeline.timeout_s, session.terms.reach_s))
        request = (await self.read(deadline)).owned()

        async def run() -> StepAnswer:
            ending = await self.inference.answer(self._call(request, WholeAnswer(pipeline, request)))
            return StepAnswer(await body_of_values(rendered(pipeline, ending)[0]), ending.early_exit)

        with self.waiting:
            answer = await session.step(run, deadline, self.number, is_last=self.is_last)
        self.record.exit_early(answer.early_exit)
        return answer

    async def stream(self) -> None:
        """Begins a step whose answer is a stream. Its caller may leave; the step runs to its end.

        Raises InvalidRequest if the pipeline does not stream.
        """
        session, loop = self.session, asyncio.get_running_loop()
        timeout_s = session.pipeline.stream_spec("/v1/sessions/{id}").timeout_s
        deadline = self.exchange.deadline(min(timeout_s, session.terms.reach_s))
        request, begun = (await self.read(deadline)).owned(), loop.create_future()
        call = self._call(request, StepCollector(session, request))  # forgets the inputs when they are sent

        async def run() -> StepAnswer:
            """Returns when the model has sent its last response."""
            self.begun_as, call.deadline = session.steps + 1, Deadline.after(session.terms.triton_idle_s)
            stream, self.opening = await self.inference.open_stream(call, self.log)
            late = DeadlineExceeded("The deadline passed. The step runs to its end, and its outputs are dropped.")
            timer = loop.call_later(deadline.remaining_s(), self.leave, late)
            begun.set_result(None)
            try:
                await stream.ended()
            finally:
                timer.cancel()
            if stream.error is not None:
                raise stream.error
            return StepAnswer(b"", stream.early_exit)

        try:
            with self.waiting:
                await session.step(run, deadline, self.number, is_last=self.is_last, begun=begun)
        except BaseException:
            self.log.append(Event(self.log.last_id + 1, "error", b"{}"))  # nobody reads it
            raise

    def leave(self, cause: GatewayError) -> None:
        """Ends the events with an error; the step goes on. No-op if the events have ended."""
        if not self.log.has_ended:
            self.record.fail(cause)
            problem = json_of(problem_of(cause, self.record.request_id))
            self.log.append(Event(self.log.last_id + 1, "error", problem))

    async def left(self) -> None:
        """Call it when nobody reads the events any more."""
        self.leave(ClientClosedRequest("The client left before the end of the step."))

    def _call(self, request: InferenceRequest, answer: Answer) -> StepCall:
        """Runs longer than the caller waits, but not longer than Triton knows the sequence."""
        session = self.session
        claim, deadline = session.admission.claim_of(self.exchange.caller), Deadline.after(session.terms.triton_idle_s)
        return StepCall(session.pipeline, claim, deadline, self.record, [request], answer, session=session)


class SessionReason(Reason):
    ENDED = "unknown_session", 4404
    LOST = "session_lost", 4410


@dataclass(eq=False)
class StepHandler(MessageHandler):
    """A WebSocket of a pipeline with sessions: each message is a step of one session, which ends with it."""

    at_once = 1
    runs_in_drain = True
    reasons: ClassVar = {
        **MessageHandler.reasons,
        UnknownSession: SessionReason.ENDED,
        SessionLost: SessionReason.LOST,
    }

    inference: Inference
    session: OpenSession
    exchange: Exchange

    def opened(self, websocket: WebSocket) -> None:
        session = self.session
        session.on_expired = lambda: websocket.close(
            SessionReason.LOST if session.ended is End.LOST else SessionReason.ENDED
        )

    async def start(self, message: Message, record: RequestRecord) -> Reply:
        """Raises SessionLost, UnknownSession, and the errors of a step before its first output."""
        exchange, pipeline = self.exchange, self.session.pipeline
        endpoint: Endpoint = exchange.scope["endpoint"]
        endpoint.check_key(exchange)  # a WebSocket may be open longer than the key is valid

        def read(deadline: Deadline) -> Awaitable[InferenceRequest]:
            return read_message(exchange, pipeline, message, deadline)

        step = StepRequest(self.inference, exchange, record, self.session, read)
        if pipeline.spec.stream is not None:
            await step.stream()
            return Reply(step.log, step.opening, step.leave, step.left)
        answer = await step.answer()
        done: Done = {
            "reason": "complete" if answer.early_exit is None else "early_exit",
            "early_exit": answer.early_exit,
            "outputs": 1,
            "request_id": record.request_id,
        }
        return Reply(LiveLog(), [Event(1, "output", answer.body), Event(2, "done", json_of(done))])

    def closed(self) -> None:
        """The session is known for a while, and must not keep its WebSocket."""
        self.session.on_expired = None
        self.session.close(End.DELETED)
