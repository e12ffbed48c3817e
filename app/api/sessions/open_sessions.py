"""The sessions of this process: opens them, finds them by their id, counts their places in Triton, runs their steps.

Triton runs only so many sequences of a model at a time. Each step is a request of one sequence, sent by POST or as a
message.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from math import ceil, inf
from time import monotonic
from typing import ClassVar

import msgspec
import prometheus_client
from msgspec import Struct
from msgspec.structs import replace

from app.admission.admission import Share
from app.admission.keys import ANYONE, Key
from app.admission.scheduler import PipelineAdmission
from app.api.call import Inference, InferenceCall
from app.api.error_table import problem_of
from app.api.exchange import Exchange
from app.api.pipelines.pipeline_endpoints import read_message, whole_answer_of
from app.api.streaming import MessageHandler, Reply
from app.core import errors
from app.core.aio import BackgroundTasks
from app.core.answer import Answer, Ending, WholeAnswer
from app.core.engine import discard_stream
from app.core.inference import Deadline, InferenceRequest, OpenSequence, TraceContext, new_request_id
from app.core.json import json_of
from app.core.model import MAX_ID_BYTES, SequenceIds
from app.http1.websocket import Message, Reason, WebSocket
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector
from app.sessions.session import (
    AnswerMemory,
    End,
    PipelineSession,
    SessionLost,
    SessionTerms,
    UnknownSession,
    own_ids_of,
)
from app.streams.stream import Done, Event, LiveLog

ID_BYTES = 16
"""A session id is a bearer capability: whoever has it can run steps."""
KEEP_S = 60.0
"""How long an ended session is known: to repeat its last answer, and to tell that it was lost."""
MOST_PAST = 10_000
SLACK_S = 1.0
"""How much later than its idle time Triton may forget a sequence."""
SWEEP_S = 0.2
"""A session ends up to this much later than it expires, but takes no further step."""
LONGEST_RETRY_S = 30
USUAL_RETRY_S = 5
"""``Retry-After`` while no sequence is known to end."""
_log = logging.getLogger("triton_gateway.session")

PlaceKey = tuple[str, str, str]
"""A model, the address of a Triton and an API key. The key is empty for the places of all; the address for a pipeline
with ``max_open``; both names for all sessions of a key."""


def new_sequence_id(ids: SequenceIds, share: Share) -> int | str:
    """Returns a random id. The processes of a gateway never make the same one.

    Other gateways at the same Triton make the same one with a chance of 1 in 2**62, or 1 in 2**30 for models whose
    control has 32 bits. Triton 2.51 reads a text as if it had 128 bytes, whatever its length.
    """
    own = own_ids_of(ids)
    if isinstance(own, str):
        return (own + secrets.token_hex(MAX_ID_BYTES // 2))[:MAX_ID_BYTES]
    return own[secrets.randbelow(len(own) // share.of) * share.of + share.number - 1]


def terms_of(pipeline: Pipeline) -> SessionTerms | None:
    """None for a pipeline without sessions."""
    return next((layer for layer in pipeline.layers if isinstance(layer, SessionTerms)), None)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of one session in all of its models at the Triton at ``address``."""

    address: str
    keys: Sequence[PlaceKey]


class Places:
    """The places of this process. ``share``: its part of them."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._taken = Counter[PlaceKey]()
        self.free_at: dict[Place, float] = {}
        """When Triton forgets the sequences of ended sessions that it still has, in monotonic seconds."""

    def take(
        self, pipeline: str, terms: SessionTerms, homes: Sequence[str], servers: int, caller: Key = ANYONE
    ) -> Place:
        """Returns a place at the Triton with the most free ones. The caller must release it.

        ``homes``: the Tritons where the model may be called, of ``servers``.
        Raises TooManyRequests, or ModelNotReady without a Triton.
        """
        key, most = caller.id, caller.limits.sessions
        if not homes:
            raise errors.ModelNotReady("No Triton has a ready model for a new session.", was_sent=False)

        def free_at(home: str) -> dict[PlaceKey, int]:
            limits: dict[PlaceKey, int] = {  # the slots are those of all Tritons together
                (model, home, ""): self._share.part(slots // servers) for model, slots in terms.slots.items()
            }
            if terms.spec.max_open is not None:
                limits[f"pipeline {pipeline}", "", ""] = self._share.part(terms.spec.max_open)
            if most is not None:
                limits["", "", key] = max(self._share.part(most), 1)
            elif key:
                limits |= {(name, at, key): max(each // 2, 1) for (name, at, _), each in limits.items()}
            return {each: limit - self._taken[each] for each, limit in limits.items()}

        address, free = max(((home, free_at(home)) for home in homes), key=lambda found: min(found[1].values()))
        full = {each for each, count in free.items() if count <= 0}
        if full:
            ends = [until for place, until in self.free_at.items() if not full.isdisjoint(place.keys)]
            next_s, is_of_key = min(ends, default=inf) - monotonic(), all(own for _, _, own in full)
            raise errors.TooManyRequests(
                f"As many sessions are open as {'this API key may' if is_of_key else 'the model can'} have.",
                hint="End sessions that are not needed any more with DELETE, or with X-Session-End on their last step"
                f"{', or let an operator raise `limits.sessions` of the key' if is_of_key else ''}.",
                retry_after_s=USUAL_RETRY_S if next_s == inf else min(max(ceil(next_s), 1), LONGEST_RETRY_S),
            )
        place = Place(address, list(free))
        self._taken.update(place.keys)
        return place

    def release(self, place: Place) -> None:
        self.free_at.pop(place, None)
        self._taken -= Counter(place.keys)


@dataclass(eq=False, slots=True)
class OpenSession(PipelineSession):
    """``owner``: the id of the API key that opened it; empty without one. ``pipeline``: as it was then."""

    owner: str
    place: Place
    pipeline: Pipeline
    admission: PipelineAdmission
    known_until: float = field(default=inf, init=False)
    """After its end, in monotonic seconds."""


def metrics_of_sessions(metrics: Metrics) -> tuple[prometheus_client.Gauge, prometheus_client.Counter]:
    opened = metrics.gauge("open_sessions", "Sessions that take steps", "pipeline")
    return opened, metrics.counter("sessions", "Sessions that ended, by reason", "pipeline", "reason")


class OpenSessions:
    """The open sessions, and those that ended a short time ago."""

    def __init__(self, inference: Inference, share: Share) -> None:
        self._inference = inference
        self._opened, self._ended_by_reason = metrics_of_sessions(inference.metrics)
        self._places = Places(share)
        self._share = share
        self._memory = AnswerMemory()
        self._sessions: dict[str, OpenSession] = {}
        self._past: dict[str, OpenSession] = {}
        """In the order of their ends."""
        self._used_ids: dict[int | str, OpenSession] = {}
        """By the id of a sequence that Triton may still have."""
        self._leaving = BackgroundTasks()
        self._sweep: asyncio.TimerHandle | None = None

    def open(self, exchange: Exchange, pipeline: Pipeline) -> OpenSession:
        """Raises InvalidRequest, TooManyRequests or ModelNotReady."""
        terms, engine, caller = terms_of(pipeline), self._inference.catalog.engine, exchange.key
        if terms is None:
            raise errors.InvalidRequest(
                f"This pipeline has no sessions: POST /v1/pipelines/{pipeline.name} runs a request.",
                hint="An operator can declare `session: true` for a model with `sequence_batching` in gateway.yaml.",
            )
        homes, servers = engine.homes(pipeline.spec.model, pipeline.spec.version), len(engine.states()) or 1
        place = self._places.take(pipeline.name, terms, homes, servers, caller)
        while (sequence_id := new_sequence_id(terms.ids, self._share)) in self._used_ids:
            pass
        session = OpenSession(
            secrets.token_urlsafe(ID_BYTES),
            terms,
            sequence_id,
            OpenSequence(place.address),
            self._memory,
            self._ended,
            caller.id,
            place,
            pipeline.of_sequence(),
            self._inference.admission_of(pipeline),
        )
        self._sessions[session.id] = self._used_ids[sequence_id] = session
        self._inference.workload.add(session)
        self._opened.labels(pipeline.name).inc()
        if self._sweep is None:
            self._look_again()
        return session

    def find(self, exchange: Exchange, session_id: str) -> OpenSession:
        """Returns also a session that ended a short time ago.

        Raises UnknownSession, or Forbidden for another key than the one that opened the session.
        """
        session = self._sessions.get(session_id) or self._past.get(session_id)
        if session is None:
            raise UnknownSession("This process has no such session, or it has ended.")
        if session.owner not in ("", exchange.record.key):
            raise errors.Forbidden("Another API key opened this session.", hint="Send the key that opened it.")
        return session

    def _look_again(self) -> None:
        """One timer for all sessions: ends idle ones, forgets past ones, and frees places. No session needs its own."""
        now = monotonic()
        for session in list(self._sessions.values()):
            session.expire()
        for past in list(self._past.values()):
            if past.known_until > now and len(self._past) <= MOST_PAST:
                break
            self._past.pop(past.id).forget()
        for past in [each for each in self._used_ids.values() if self._places.free_at.get(each.place, inf) <= now]:
            self._free(past)
        has_more = self._sessions or self._past or self._used_ids
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._look_again) if has_more else None

    def _ended(self, session_id: str, reason: End) -> None:
        session = self._past[session_id] = self._sessions.pop(session_id)
        session.known_until = monotonic() + KEEP_S
        self._opened.labels(session.pipeline.name).dec()
        self._ended_by_reason.labels(session.pipeline.name, reason).inc()
        fields = {
            "pipeline": session.pipeline.name,
            "reason": str(reason),
            "steps": session.steps,
            "duration_s": round(monotonic() - session.opened_at, 3),
            "key": session.owner,
        }
        _log.log(logging.WARNING if reason is End.LOST else logging.INFO, "session ended", extra=fields)
        self._leaving.start(self._leave(session))

    async def _leave(self, session: OpenSession) -> None:
        """Ends the sequence in Triton if that is possible, and frees its place when Triton has forgotten it."""
        await session.settle()
        sequence, terms, queued_at = session.sequence, session.terms, session.queued_at
        has_state = queued_at is not None and not sequence.is_forgotten and not sequence.is_lost
        if has_state and terms.spec.end_inputs is not None:
            ending = session.pipeline.request_of_json(json_of(terms.spec.end_inputs))
            request = replace(session.in_sequence(ending, ends=True), request_id=new_request_id())
            with suppress(errors.GatewayError):
                await discard_stream(self._inference.catalog.engine, request, Deadline.after(terms.triton_idle_s))
                sequence.is_forgotten = True
        self._inference.workload.remove(session)
        if queued_at is None or sequence.is_forgotten:
            self._free(session)
        else:
            self._places.free_at[session.place] = queued_at + terms.longest_idle_s + SLACK_S

    def _free(self, session: OpenSession) -> None:
        self._places.release(session.place)
        del self._used_ids[session.sequence_id]


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

    def finish(self, error: errors.GatewayError | None = None) -> Ending:
        """Raises SessionLost if the state is lost, and the errors of :meth:`Collector.finish`."""
        is_sent = not isinstance(error, errors.Unavailable) or error.was_sent
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
    log: LeavableLog = msgspec.field(default_factory=LeavableLog)
    """The events of a streamed step."""
    begun_as: int = 0
    """The number of a streamed step."""

    async def answer(self) -> WholeAnswer:
        """Runs the step, and returns its whole answer."""
        session, pipeline = self.session, self.session.pipeline
        deadline = self.exchange.deadline(min(pipeline.timeout_s, session.terms.reach_s))
        request = (await self.read(deadline)).owned()

        async def run() -> WholeAnswer:
            call = self._call(request, Collector(pipeline, request, is_whole=True))
            return await whole_answer_of(pipeline, await self.inference.answer(call))

        with self.waiting:
            answer = await session.step(run, deadline, self.number, is_last=self.is_last)
        self.record.exit_early(answer.early_exit)
        return answer

    async def stream(self) -> Reply:
        """Begins a step whose answer is a stream. Its caller may leave; the step runs to its end.

        Raises InvalidRequest if the pipeline does not stream.
        """
        session, loop = self.session, asyncio.get_running_loop()
        timeout_s = session.pipeline.stream_spec("/v1/sessions/{id}").timeout_s
        deadline = self.exchange.deadline(min(timeout_s, session.terms.reach_s))
        request, begun = (await self.read(deadline)).owned(), loop.create_future()
        call = self._call(request, StepCollector(session, request))  # forgets the inputs when they are sent
        reply = Reply(self.log, end=self.leave, ended=self.left)

        async def run() -> WholeAnswer:
            """Returns when the model has sent its last response."""
            self.begun_as, call.deadline = session.steps + 1, Deadline.after(session.terms.triton_idle_s)
            stream, reply.opening = await self.inference.open_stream(call, self.log)
            late = errors.DeadlineExceeded(
                "The deadline passed. The step runs to its end, and its outputs are dropped."
            )
            timer = loop.call_later(deadline.remaining_s(), self.leave, late)
            begun.set_result(None)
            try:
                await stream.ended()
            finally:
                timer.cancel()
            if stream.error is not None:
                raise stream.error
            return WholeAnswer(b"", stream.early_exit)

        try:
            with self.waiting:
                await session.step(run, deadline, self.number, is_last=self.is_last, begun=begun)
        except BaseException:
            self.log.append(Event(self.log.last_id + 1, "error", b"{}"))  # ends the log; it has no readers
            raise
        return reply

    def leave(self, cause: errors.GatewayError) -> None:
        """Ends the events with an error; the step goes on. No-op if the events have ended."""
        if not self.log.has_ended:
            self.record.fail(cause)
            problem = json_of(problem_of(cause, self.record.request_id))
            self.log.append(Event(self.log.last_id + 1, "error", problem))

    async def left(self) -> None:
        """Call it when the reader of the events has left."""
        self.leave(errors.ClientClosedRequest("The client left before the end of the step."))

    def _call(self, request: InferenceRequest, answer: Answer) -> StepCall:
        """Runs longer than the caller waits, but not longer than Triton knows the sequence."""
        session = self.session
        claim, deadline = session.admission.claim_of(self.exchange.key), Deadline.after(session.terms.triton_idle_s)
        return StepCall(session.pipeline, claim, deadline, self.record, [request], answer, session=session)


class SessionReason(Reason):
    ENDED = "unknown_session", 4404
    LOST = "session_lost", 4410


@dataclass(eq=False)
class StepHandler(MessageHandler):
    """A WebSocket of a pipeline with sessions: each message is a step of one session, which ends with it."""

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

        def read(deadline: Deadline) -> Awaitable[InferenceRequest]:
            return read_message(exchange, pipeline, message, deadline)

        step = StepRequest(self.inference, exchange, record, self.session, read)
        if pipeline.spec.stream is not None:
            return await step.stream()
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
