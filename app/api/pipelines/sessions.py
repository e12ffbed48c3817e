"""``/v1/sessions``: the steps of stateful models, each a request of one sequence in Triton."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypedDict

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from app.admission.keys import Caller
from app.api.bodies import read_body
from app.api.deadlines import deadline_of
from app.api.dialect import ShortRoute
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange, Header, exchange_of
from app.api.inference import Inference, InferenceCall, Target
from app.api.limits import Limits
from app.api.pipelines.reading import check_is_start, read_inference
from app.api.pipelines.results import body_of_values, exit_headers, rendered
from app.api.pipelines.session_passing import STEP, SessionPassing
from app.api.pipelines.session_streams import StepCollector, StepStream
from app.api.responses import JSON, JsonResponse
from app.api.routing import router_of
from app.api.streaming import Start, StreamResponse
from app.api.workload import Workload
from app.core.errors import Forbidden, InvalidRequest, MisdirectedSession, TooManyRequests, UnknownSession
from app.core.inference import Deadline, InferenceRequest
from app.core.rows import owned
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer
from app.sessions.home import SessionHome
from app.sessions.places import SharedPlaces
from app.sessions.registry import Sessions
from app.sessions.session import End, PipelineSession, SessionStep, StepAnswer

IS_LAST = b"x-session-end"
_MOST_DIGITS = 15

_log = logging.getLogger("triton_gateway.session")


@dataclass(slots=True)
class Served:
    """What the steps of a session run: its pipeline as it was when the session was opened.

    ``target``: makes each request the running step of the session's sequence.
    """

    pipeline: Pipeline
    target: Target


ServedSession = PipelineSession[Served]


class SessionOpened(TypedDict):
    id: str
    url: str
    expires_in_s: float


class SessionRecords:
    """Tells workload, metrics and log what happens to sessions. Implements SessionObserver."""

    def __init__(self, metrics: Metrics, workload: Workload) -> None:
        self._metrics = metrics
        self._workload = workload

    def opened(self, session: ServedSession) -> None:
        self._workload.add(session)
        self._metrics.sessions.opened(session.pipeline)

    def ended(self, session: ServedSession, reason: End) -> None:
        self._metrics.sessions.ended(session.pipeline, reason)
        fields = {
            "pipeline": session.pipeline,
            "reason": str(reason),
            "steps": session.steps,
            "duration_s": round(monotonic() - session.opened_at, 3),
            "key": session.owner,
        }
        _log.log(logging.WARNING if reason is End.LOST else logging.INFO, "session ended", extra=fields)

    def left(self, session: ServedSession) -> None:
        self._workload.remove(session)


class SessionRoutes:
    """A session of another worker is passed on to it (``_owner_of``)."""

    def __init__(
        self,
        inference: Inference,
        limits: Limits,
        sessions: Sessions[Served],
        home: SessionHome,
        shared: SharedPlaces | None,
    ) -> None:
        self._inference = inference
        self._limits = limits
        self._sessions = sessions
        self._home = home
        self._shared = shared
        self._passing = SessionPassing(home)

    def router(self) -> APIRouter:
        return router_of(
            post={
                "/v1/pipelines/{name}/sessions": self.open_session,
                "/v1/sessions/{session_id}/stream": self.stream_step,
            },
            delete={"/v1/sessions/{session_id}": self.delete_session},
        )

    def short_routes(self) -> list[ShortRoute]:
        return [ShortRoute("/v1/sessions/{session_id}", self.run_step)]

    async def open_session(self, name: str, request: Request) -> Response:
        exchange = exchange_of(request)
        pipeline = self._inference.admit(exchange, name, None)
        try:
            session = await self.opened(exchange, pipeline)
        except TooManyRequests as exc:
            return await self._passing.opened_elsewhere(exchange, exc)
        url = f"/v1/sessions/{session.id}"
        opened = SessionOpened(id=session.id, url=url, expires_in_s=_rounded(session.expires_in_s))
        return JsonResponse(opened, 201, {"Location": url})

    async def opened(self, exchange: Exchange, pipeline: Pipeline) -> ServedSession:
        """Opens a session in this process.

        Raises InvalidRequest, TooManyRequests, ModelNotReady or UpstreamUnavailable.
        """
        name, terms = pipeline.name, pipeline.session
        if terms is None:
            raise InvalidRequest(
                f"This pipeline has no sessions: POST /v1/pipelines/{name} runs a request.",
                hint="An operator can declare `session: true` for a model with `sequence_batching` in gateway.yaml.",
            )
        target = self._inference.target_of(pipeline)
        served = Served(pipeline.of_session(), target)
        model = pipeline.spec.model, pipeline.spec.version
        session = await self._sessions.open(name, model, terms, exchange.record.key, served)

        def prepared(request: InferenceRequest, deadline: Deadline) -> InferenceRequest:
            return session.prepared(target.prepared(request, deadline))

        served.target = replace(target, prepared=prepared)
        return session

    async def delete_session(self, session_id: str, request: Request) -> Response:
        exchange = exchange_of(request)
        if (owner := await self._owner_of(session_id)) != self._home.number:
            return await self._passing.answer_of(owner, exchange)
        session = self._found(exchange, session_id)
        if session.ended is not None:
            raise UnknownSession("The session has ended.")
        session.close(End.DELETED)
        return Response(status_code=204)

    async def run_step(self, exchange: Exchange, found: Mapping[str, str], send: Send) -> None:
        session_id = found["session_id"]
        if session_id not in self._sessions and (owner := await self._owner_of(session_id)) != self._home.number:
            await self._pass_on(owner, exchange, send)
            return
        session = self._found(exchange, session_id)
        pipeline = session.subject.pipeline
        self._inference.admit_step(exchange, pipeline)
        number, is_last = _number_of(exchange), _is_last(exchange)
        deadline = deadline_of(exchange, min(pipeline.timeout_s, session.terms.reach_s))
        inference = owned(await read_inference(exchange, pipeline, self._limits))
        record, caller = exchange.record, exchange.caller
        step = SessionStep(number, is_last, deadline, lambda: self.answer(record, caller, session, inference))
        with CancelledOnDisconnect(exchange):
            answer = await session.step(step)
        exchange.record.exit_early(answer.early_exit)
        await exchange.answer(_headers_of(session, answer), answer.body)

    async def stream_step(self, session_id: str, request: Request) -> Response:
        exchange = exchange_of(request)
        if (owner := await self._owner_of(session_id)) != self._home.number:
            return await self._passing.stream_of(owner, exchange, await self._body_to_pass(exchange), self._limits)
        session = self._found(exchange, session_id)
        pipeline = session.subject.pipeline
        self._inference.admit_step(exchange, pipeline)
        exchange.record.transport = "stream"
        check_is_start(exchange)
        number, is_last = _number_of(exchange), _is_last(exchange)
        deadline = self.stream_deadline(exchange, session)
        inference = owned(await read_inference(exchange, pipeline, self._limits))
        stream = self.stream_of(exchange.record, exchange.caller, session, inference, deadline)
        with CancelledOnDisconnect(exchange):
            opening = await stream.open(number, is_last=is_last)
        start = Start(events=opening)
        response = StreamResponse(stream.log, self._limits, start=start, on_left=stream.leave, closing=stream.left)
        response.raw_headers = [*response.raw_headers, (STEP, b"%d" % stream.number)]
        return response

    def stream_deadline(self, exchange: Exchange, session: ServedSession) -> Deadline:
        """Of a step whose answer is a stream. Raises InvalidRequest if the pipeline does not stream."""
        spec = session.subject.pipeline.stream_spec()
        return deadline_of(exchange, min(spec.timeout_s, session.terms.reach_s))

    def stream_of(
        self,
        record: RequestRecord,
        caller: Caller,
        session: ServedSession,
        inference: InferenceRequest,
        deadline: Deadline,
    ) -> StepStream:
        """A step whose answer is a stream."""
        answer = StepCollector(session.subject.pipeline, inference, session)
        call = InferenceCall(session.subject.target, inference, answer, deadline, record, caller)
        return StepStream(self._inference, session, call)

    async def _owner_of(self, session_id: str) -> int:
        """The worker that has the session. Raises UnknownSession, SessionLost or MisdirectedSession."""
        try:
            return self._home.owner_of(session_id)
        except MisdirectedSession as exc:
            address = None if self._shared is None else await self._shared.address_of(session_id.partition(".")[0])
            if address is None:
                raise
            raise MisdirectedSession(f"The gateway at {address} has this session, or had it until it ended.") from exc

    async def _pass_on(self, owner: int, exchange: Exchange, send: Send) -> None:
        answer = await self._passing.answer_of(owner, exchange, await self._body_to_pass(exchange))
        await answer(exchange.scope, exchange.receive, send)

    async def _body_to_pass(self, exchange: Exchange) -> bytes:
        """The owner counts and logs the step."""
        exchange.record.transport = None
        self._inference.workload.add(exchange.work)
        return bytes(await read_body(exchange, self._limits.of_any(self._inference.allowed(exchange))))

    async def answer(
        self, record: RequestRecord, caller: Caller, session: ServedSession, inference: InferenceRequest
    ) -> StepAnswer:
        """Runs longer than the caller waits, but not longer than Triton knows the sequence."""
        pipeline, target = session.subject.pipeline, session.subject.target
        deadline = Deadline.after(session.terms.triton_idle_s)
        call = InferenceCall(target, inference, WholeAnswer(pipeline, inference), deadline, record, caller)
        ending = await self._inference.answer(call)
        values, _ = rendered(pipeline, ending)
        return StepAnswer(await body_of_values(values), ending.early_exit)

    def _found(self, exchange: Exchange, session_id: str) -> ServedSession:
        """Raises UnknownSession, or Forbidden for another key than the one that opened the session."""
        session = self._sessions.find(session_id)
        if session.owner not in ("", exchange.record.key):
            raise Forbidden("Another API key opened this session.", hint="Send the key that opened it.")
        return session


def session_routes(
    inference: Inference, limits: Limits, home: SessionHome, shared: SharedPlaces | None
) -> SessionRoutes:
    records = SessionRecords(inference.metrics, inference.workload)
    sessions = Sessions(
        inference.engine, home, records, lambda session: session.subject.pipeline.ending_request(), shared
    )
    return SessionRoutes(inference, limits, sessions, home, shared)


def _number_of(exchange: Exchange) -> int | None:
    """Raises InvalidRequest if ``X-Session-Step`` is not a positive number."""
    text = exchange.header(STEP)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and int(text)):
        raise InvalidRequest("X-Session-Step is not the number of a step; the first step is 1.")
    return int(text)


def _is_last(exchange: Exchange) -> bool:
    """Raises InvalidRequest if ``X-Session-End`` is neither ``true`` nor ``false``."""
    text = exchange.header(IS_LAST)
    if text is None:
        return False
    if text.lower() not in ("true", "false"):
        raise InvalidRequest("X-Session-End must be `true` or `false`.")
    return text.lower() == "true"


def _headers_of(session: ServedSession, answer: StepAnswer) -> list[Header]:
    length = (b"content-length", b"%d" % len(answer.body))
    headers = [JSON, length, (STEP, b"%d" % session.steps), *exit_headers(answer.early_exit)]
    if session.ended is None:
        headers.append((b"x-session-expires-in", f"{_rounded(session.expires_in_s):g}".encode()))
    return headers


def _rounded(seconds: float) -> float:
    """Rounds down, to milliseconds."""
    return int(seconds * 1000) / 1000
