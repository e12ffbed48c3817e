"""``/v1/sessions``: the routes of sessions and their steps."""

from collections.abc import Mapping
from typing import TypedDict

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from app.api.dialect import Services, ShortRoute
from app.api.disconnect import CancelledOnDisconnect
from app.api.error_table import ROW_BY_ERROR
from app.api.exchange import Exchange, Header, exchange_of
from app.api.pipelines.reading import check_is_start, read_inference
from app.api.pipelines.results import exit_headers
from app.api.pipelines.session_steps import SessionSteps, StepRequest
from app.api.responses import JSON, JsonResponse
from app.api.routing import router_of
from app.api.streaming import Start, StreamResponse
from app.core.errors import Forbidden, HttpSessionsOff, InvalidRequest, UnknownSession
from app.sessions.session import End, PipelineSession, StepAnswer

STEP = b"x-session-step"
IS_LAST = b"x-session-end"
_MOST_DIGITS = 15


class SessionOpened(TypedDict):
    id: str
    url: str
    expires_in_s: float


class SessionRoutes:
    def __init__(self, services: Services, steps: SessionSteps) -> None:
        self._inference = services.inference
        self._limits = services.limits
        self._is_alone = services.share.is_whole
        self._steps = steps

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
        if pipeline.session is not None and not self._is_alone:
            raise HttpSessionsOff(
                "This gateway has several processes, and the steps of a session would reach different ones.",
                hint=ROW_BY_ERROR[HttpSessionsOff].remedy.replace("{pipeline}", name),
            )
        session = self._steps.opened(exchange, pipeline)
        url = f"/v1/sessions/{session.id}"
        opened = SessionOpened(id=session.id, url=url, expires_in_s=_rounded(session.expires_in_s))
        return JsonResponse(opened, 201, {"Location": url})

    async def delete_session(self, session_id: str, request: Request) -> Response:
        exchange = exchange_of(request)
        session = self._found(exchange, session_id)
        if session.ended is not None:
            raise UnknownSession("The session has ended.")
        session.close(End.DELETED)
        return Response(status_code=204)

    async def run_step(self, exchange: Exchange, found: Mapping[str, str], send: Send) -> None:
        step = self._step_of(exchange, found["session_id"], "unary")
        answer = await self._steps.answer(step)
        await exchange.answer(_headers_of(step.session, answer), answer.body)

    async def stream_step(self, session_id: str, request: Request) -> Response:
        exchange = exchange_of(request)
        stream = await self._steps.stream(self._step_of(exchange, session_id, "stream"))
        start = Start(events=stream.opening)
        response = StreamResponse(stream.log, self._limits, start=start, on_left=stream.leave, closing=stream.left)
        response.raw_headers = [*response.raw_headers, (STEP, b"%d" % stream.number)]
        return response

    def _step_of(self, exchange: Exchange, session_id: str, transport: str) -> StepRequest:
        """Raises UnknownSession, Forbidden or InvalidRequest."""
        session = self._found(exchange, session_id)
        self._inference.admit_step(exchange, session.pipeline)
        exchange.record.transport = transport
        if transport == "stream":
            check_is_start(exchange)
        return StepRequest(
            exchange,
            exchange.record,
            session,
            lambda deadline: read_inference(exchange, session.pipeline, self._limits, deadline),
            _number_of(exchange),
            _is_last(exchange),
            CancelledOnDisconnect(exchange),
        )

    def _found(self, exchange: Exchange, session_id: str) -> PipelineSession:
        """Raises UnknownSession, or Forbidden for another key than the one that opened the session."""
        session = self._steps.find(session_id)
        if session.owner not in ("", exchange.record.key):
            raise Forbidden("Another API key opened this session.", hint="Send the key that opened it.")
        return session


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


def _headers_of(session: PipelineSession, answer: StepAnswer) -> list[Header]:
    length = (b"content-length", b"%d" % len(answer.body))
    headers = [JSON, length, (STEP, b"%d" % session.steps), *exit_headers(answer.early_exit)]
    if session.ended is None:
        headers.append((b"x-session-expires-in", f"{_rounded(session.expires_in_s):g}".encode()))
    return headers


def _rounded(seconds: float) -> float:
    """Rounds down, to milliseconds."""
    return int(seconds * 1000) / 1000
