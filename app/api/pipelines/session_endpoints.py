"""``/v1/sessions``: the routes of sessions and their steps."""

from starlette.responses import Response

from app.api.call import Inference
from app.api.disconnect import CancelledOnDisconnect
from app.api.endpoint import Found
from app.api.error_table import ROW_BY_ERROR
from app.api.exchange import Exchange, Header
from app.api.limits import Limits
from app.api.pipelines.answers import SessionOpened
from app.api.pipelines.reading import check_is_start, read_inference
from app.api.pipelines.results import exit_headers
from app.api.pipelines.session_steps import SessionSteps, StepRequest
from app.api.responses import JSON, JsonResponse
from app.api.streaming import Start, StreamResponse
from app.core.errors import Forbidden, HttpSessionsOff, InvalidRequest, UnknownSession
from app.sessions.session import End, PipelineSession, StepAnswer

STEP = b"x-session-step"
IS_LAST = b"x-session-end"
_MOST_DIGITS = 15


class SessionEndpoints:
    """``is_alone``: whether no other process serves the API."""

    def __init__(self, inference: Inference, limits: Limits, steps: SessionSteps, *, is_alone: bool) -> None:
        self._inference = inference
        self._limits = limits
        self._is_alone = is_alone
        self._steps = steps

    async def open_session(self, exchange: Exchange, found: Found) -> Response:
        """Open a session.

        Each request to the address in `Location` is a step of one sequence of the model.
        """
        name = found["name"]
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

    async def delete_session(self, exchange: Exchange, found: Found) -> Response:
        """End a session.

        A running step runs to its end.
        """
        session = self._found(exchange, found["id"])
        if session.ended is not None:
            raise UnknownSession("The session has ended.")
        session.close(End.DELETED)
        return Response(status_code=204)

    async def run_step(self, exchange: Exchange, found: Found) -> None:
        """Run a step of a session.

        Steps run in order, one at a time. The body and the answer are those of the session's pipeline.
        """
        step = self._step_of(exchange, found["id"], "unary")
        answer = await self._steps.answer(step)
        await exchange.answer(_headers_of(step.session, answer), answer.body)

    async def stream_step(self, exchange: Exchange, found: Found) -> Response:
        """Run a step of a session as a stream.

        The step runs to its end, also if the client leaves. A repeated step is 409.
        """
        stream = await self._steps.stream(self._step_of(exchange, found["id"], "stream"))
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
