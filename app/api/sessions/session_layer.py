"""``/v1/sessions``: a layer over the pipelines whose requests are steps of sessions."""

import logging
from typing import ClassVar

from starlette.responses import Response

from app.api.call import Inference
from app.api.endpoint import Endpoint, EndpointGroup, Found
from app.api.error_table import ErrorRow, add_rows
from app.api.exchange import CancelledOnDisconnect, Exchange
from app.api.limits import Limits
from app.api.pipelines.reading import check_is_start, read_inference
from app.api.pipelines.results import exit_headers
from app.api.request_layer import Layer
from app.api.responses import JSON, JsonResponse
from app.api.sessions import session_operations as of_sessions
from app.api.sessions.open_sessions import OpenSession, OpenSessions
from app.api.sessions.session_operations import ANSWER_HEADERS, SessionOpened, session_samples
from app.api.sessions.session_socket import StepHandler
from app.api.sessions.session_steps import StepRequest
from app.api.streaming import Start, StreamResponse
from app.core.errors import Forbidden, InvalidRequest
from app.core.share import Share
from app.observability.record import hide_ids_after
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec
from app.sessions.session import End
from app.sessions.session_errors import HttpSessionsOff, SessionLost, StepOutOfTurn, UnknownSession

STEP = b"x-session-step"
IS_LAST = b"x-session-end"
_MOST_DIGITS = 15
_WITH_WORKERS = "Open a WebSocket at /v1/pipelines/{pipeline}/session, or set GATEWAY_WORKERS=1."
_FLAG = {"sessions": "Whether each request is a step of a session"}
_log = logging.getLogger(__name__)

add_rows(
    {
        UnknownSession: ErrorRow(
            404,
            "The process has no session with this id, or the session has ended: by its last step, DELETE, `idle_s` or "
            "`max_s`.",
            "Open a session with POST /v1/pipelines/{pipeline}/sessions. With several gateways, send all requests of a "
            "session to the gateway that opened it.",
        ),
        StepOutOfTurn: ErrorRow(
            409,
            "The number in X-Session-Step is not that of the next step, the answer of a repeated step is no longer "
            "kept, or too many steps of the session wait.",
            "Send one step at a time. `X-Session-Step` of the answer has the number of the last answered step.",
            headers=lambda error: {"X-Session-Step": str(error.last_step)},
        ),
        SessionLost: ErrorRow(
            410,
            "Triton does not have the session's state any more: it restarted, loaded the model again, was lost, or the "
            "session was idle for longer than the model allows.",
            "Open a new session. `X-Session-Step` of the answer has the number of the last answered step.",
            headers=lambda error: {"X-Session-Step": str(error.last_step)},
        ),
        HttpSessionsOff: ErrorRow(
            501,
            "The gateway has several workers, and a session lives in one of them: over HTTP, its steps would reach "
            "others.",
            _WITH_WORKERS,
        ),
    }
)
hide_ids_after("/v1/sessions/")


class Sessions(Layer):
    """``share``: of this process. Sessions over HTTP need the only process, those over a WebSocket live in theirs."""

    headers = ("X-Session-Step", "X-Session-End")
    answer_headers = ANSWER_HEADERS
    flags: ClassVar = {"PipelineSummary": _FLAG, "PipelineDescription": _FLAG}

    def __init__(self, inference: Inference, limits: Limits, share: Share) -> None:
        self._inference = inference
        self._limits = limits
        self._share = share
        self._sessions = OpenSessions(inference, share)
        endpoints = [
            Endpoint("POST", "/v1/pipelines/{name}/sessions", self.open_session, of_sessions.open_session),
            Endpoint("POST", "/v1/sessions/{id}", self.run_step, of_sessions.run_step, "unary"),
            Endpoint("POST", "/v1/sessions/{id}/stream", self.stream_step, of_sessions.stream_step),
            Endpoint("DELETE", "/v1/sessions/{id}", self.delete_session, of_sessions.delete_session),
        ]
        tags = {"sessions": "Steps of models with a state"}
        self.groups = [EndpointGroup(endpoints, lambda _visible: tags, dialect="pipelines")]
        has_sessions = any(not entry.spec.takes_requests for entry in inference.catalog.entries.values())
        if has_sessions and share.of > 1 and share.number == 1:
            path = "POST /v1/pipelines/{pipeline}/sessions"
            _log.warning("%s answers 501 http_sessions_off: use a WebSocket, or set GATEWAY_WORKERS=1", path)

    def flags_of(self, spec: PipelineSpec) -> dict[str, bool]:
        return {"sessions": spec.session is not None}

    def samples_of(self, pipeline: Pipeline, base_url: str, *, with_key: bool) -> dict[str, str] | None:
        return None if pipeline.spec.takes_requests else session_samples(pipeline, base_url, with_key=with_key)

    def handler_of(self, exchange: Exchange, pipeline: Pipeline) -> StepHandler | None:
        if pipeline.spec.takes_requests:
            return None
        session, check_key = self._sessions.open(exchange, pipeline), exchange.scope["endpoint"].check_key
        return StepHandler(self._inference, session, exchange, check_key)

    async def open_session(self, exchange: Exchange, found: Found) -> Response:
        """Open a session.

        Each request to the address in `Location` is a step of one sequence of the model.
        """
        name = found["name"]
        pipeline = self._inference.admit(exchange, name, None)
        if not pipeline.spec.takes_requests and not self._share.is_whole:
            raise HttpSessionsOff(
                "This gateway has several processes, and the steps of a session would reach different ones.",
                hint=_WITH_WORKERS.replace("{pipeline}", name),
            )
        session = self._sessions.open(exchange, pipeline)
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
        answer, session = await step.answer(self._inference), step.session
        length = (b"content-length", b"%d" % len(answer.body))
        headers = [JSON, length, (STEP, b"%d" % session.steps), *exit_headers(answer.early_exit)]
        if session.ended is None:
            headers.append((b"x-session-expires-in", f"{_rounded(session.expires_in_s):g}".encode()))
        await exchange.answer(headers, answer.body)

    async def stream_step(self, exchange: Exchange, found: Found) -> Response:
        """Run a step of a session as a stream.

        The step runs to its end, also if the client leaves. A repeated step is 409.
        """
        stream = await self._step_of(exchange, found["id"], "stream").stream(self._inference)
        start = Start(events=stream.opening)
        response = StreamResponse(stream.log, self._limits, start=start, on_left=stream.leave, closing=stream.left)
        response.raw_headers = [*response.raw_headers, (STEP, b"%d" % stream.number)]
        return response

    def _step_of(self, exchange: Exchange, session_id: str, transport: str) -> StepRequest:
        """The gateway also runs it while it drains. Raises UnknownSession, Forbidden or InvalidRequest."""
        session, inference, record = self._found(exchange, session_id), self._inference, exchange.record
        record.transport, record.pipeline = "unary", session.pipeline.name
        inference.workload.add(exchange)
        for admitted in inference.admitted:
            admitted(exchange, session.pipeline)
        record.transport = transport
        if transport == "stream":
            check_is_start(exchange)
        number, last = exchange.header(STEP), exchange.header(IS_LAST)
        if number is not None and not (
            number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS and int(number)
        ):
            raise InvalidRequest("X-Session-Step is not the number of a step; the first step is 1.")
        if last is not None and last.lower() not in ("true", "false"):
            raise InvalidRequest("X-Session-End must be `true` or `false`.")
        return StepRequest(
            exchange,
            record,
            session,
            lambda deadline: read_inference(exchange, session.pipeline, self._limits, deadline),
            None if number is None else int(number),
            last is not None and last.lower() == "true",
            CancelledOnDisconnect(exchange),
        )

    def _found(self, exchange: Exchange, session_id: str) -> OpenSession:
        """Raises UnknownSession, or Forbidden for another key than the one that opened the session."""
        session = self._sessions.find(session_id)
        if session.owner not in ("", exchange.record.key):
            raise Forbidden("Another API key opened this session.", hint="Send the key that opened it.")
        return session


def _rounded(seconds: float) -> float:
    """Rounds down, to milliseconds."""
    return int(seconds * 1000) / 1000
