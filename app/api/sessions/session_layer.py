"""``/v1/sessions``: a layer over the pipelines whose requests are steps of sessions."""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypedDict

from starlette.responses import Response

from app.admission.admission import Share
from app.api import openapi
from app.api.bodies import Limits
from app.api.call import Inference
from app.api.endpoint import Endpoint, EndpointGroup, Found, Layer
from app.api.error_table import ROW_BY_ERROR, add_rows
from app.api.exchange import JSON, Exchange, JsonResponse
from app.api.pipelines.pipeline_endpoints import check_is_start, read_inference
from app.api.pipelines.pipeline_operations import content_of, events_answer, links, output_of, request_of, result_of
from app.api.sessions.open_sessions import OpenSessions, StepHandler, StepRequest
from app.api.streaming import StreamResponse
from app.core import errors
from app.core.errors import InvalidRequest
from app.core.json import COUNT, TEXT, Schema, enum_of, one_of
from app.observability.record import hide_ids_after
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec
from app.sessions import session as sessions_module
from app.sessions.session import End, HttpSessionsOff, SessionLost, StepOutOfTurn, UnknownSession

STEP = b"x-session-step"
_NUMBER = re.compile("[0-9]{1,15}")
_FLAG = {"sessions": "Whether each request is a step of a session"}
_ANSWER_HEADERS = openapi.answer_headers(
    ("X-Session-Step", "The number of the last answered step of the session", True, COUNT),
    (
        "X-Session-Expires-In",
        "Seconds until the session expires without a further step",
        False,
        {"type": "number", "minimum": 0},
    ),
)
_STEP_HEADERS = (
    openapi.header(
        "X-Session-Step",
        {"type": "integer", "minimum": 1, "maximum": 10**15 - 1},
        "The number of the step, from 1: a repeated step gets the first answer again.",
    ),
    openapi.header("X-Session-End", enum_of(["true", "false"]), "`true`: the last step of the session"),
)
_ID = openapi.in_path("id", TEXT)
_log = logging.getLogger(__name__)


add_rows("app.api.sessions", vars(sessions_module))
hide_ids_after("/v1/sessions/")


class SessionOpened(TypedDict):
    id: str
    url: str
    expires_in_s: float


class Sessions(Layer):
    """``share``: of this process. Sessions over HTTP need the only process, those over a WebSocket live in theirs."""

    headers = ("X-Session-Step", "X-Session-End")
    answer_headers = _ANSWER_HEADERS
    flags: ClassVar = {"PipelineSummary": _FLAG, "PipelineDescription": _FLAG}

    def __init__(self, inference: Inference, limits: Limits, share: Share) -> None:
        self._inference = inference
        self._limits = limits
        self._share = share
        self._sessions = OpenSessions(inference, share)
        endpoints = [
            Endpoint("POST", "/v1/pipelines/{name}/sessions", self.open_session, _open_operations),
            Endpoint("POST", "/v1/sessions/{id}", self.run_step, _run_operations, "unary"),
            Endpoint("POST", "/v1/sessions/{id}/stream", self.stream_step, _stream_operations),
            Endpoint("DELETE", "/v1/sessions/{id}", self.delete_session, _delete_operations),
        ]
        tags = {"sessions": "Steps of models with a state"}
        self.groups = [EndpointGroup(endpoints, lambda _visible: tags, dialect="pipelines")]
        has_sessions = any(not entry.spec.takes_requests for entry in inference.catalog.entries.values())
        if has_sessions and share.of > 1 and share.number == 1:
            path = "POST /v1/pipelines/{pipeline}/sessions"
            _log.warning("%s answers 501 http_sessions_off: use a WebSocket, or set GATEWAY_WORKERS=1", path)

    def flags_of(self, spec: PipelineSpec) -> dict[str, bool]:
        return {"sessions": spec.session is not None}

    def samples_of(self, pipeline: Pipeline) -> str | None:
        return None if pipeline.spec.takes_requests else "sessions/samples.jinja"

    def handler_of(self, exchange: Exchange, pipeline: Pipeline) -> StepHandler | None:
        if pipeline.spec.takes_requests:
            return None
        return StepHandler(self._inference, self._sessions.open(exchange, pipeline), exchange)

    async def open_session(self, exchange: Exchange, found: Found) -> Response:
        """Open a session.

        Each request to the address in `Location` is a step of one sequence of the model.
        """
        name = found["name"]
        pipeline = self._inference.admit(exchange, name, None)
        if not pipeline.spec.takes_requests and self._share.of > 1:
            raise HttpSessionsOff(
                "This gateway has several processes, and the steps of a session would reach different ones.",
                hint=ROW_BY_ERROR[HttpSessionsOff].remedy.replace("{pipeline}", name),
            )
        session = self._sessions.open(exchange, pipeline)
        url = f"/v1/sessions/{session.id}"
        opened = SessionOpened(id=session.id, url=url, expires_in_s=_rounded(session.expires_in_s))
        return JsonResponse(opened, 201, {"Location": url})

    async def delete_session(self, exchange: Exchange, found: Found) -> Response:
        """End a session.

        A running step runs to its end.
        """
        session = self._sessions.find(exchange, found["id"])
        if session.ended is not None:
            raise UnknownSession("The session has ended.")
        session.close(End.DELETED)
        return Response(status_code=204)

    async def run_step(self, exchange: Exchange, found: Found) -> None:
        """Run a step of a session.

        Steps run in order, one at a time. The body and the answer are those of the session's pipeline.
        """
        step = self._step_of(exchange, found["id"], "unary")
        answered, session = await step.answer(), step.session
        headers = [JSON, (STEP, b"%d" % session.steps)]
        if session.ended is None:
            headers.append((b"x-session-expires-in", f"{_rounded(session.expires_in_s):g}".encode()))
        await exchange.answer(answered.body, *headers)

    async def stream_step(self, exchange: Exchange, found: Found) -> Response:
        """Run a step of a session as a stream.

        The step runs to its end, also if the client leaves. A repeated step is 409.
        """
        step = self._step_of(exchange, found["id"], "stream")
        response = StreamResponse(await step.stream(), self._limits)
        response.raw_headers = [*response.raw_headers, (STEP, b"%d" % step.begun_as)]
        return response

    def _step_of(self, exchange: Exchange, session_id: str, transport: str) -> StepRequest:
        """The gateway also runs it while it drains. Raises UnknownSession, Forbidden or InvalidRequest."""
        session, inference, record = self._sessions.find(exchange, session_id), self._inference, exchange.record
        record.transport, record.pipeline = transport, session.pipeline.name
        inference.workload.add(exchange)
        for admitted in inference.admitted:
            admitted(exchange, session.pipeline)
        if transport == "stream":
            check_is_start(exchange)
        number, last = exchange.header(STEP), exchange.header(b"x-session-end")
        if number is not None and not (_NUMBER.fullmatch(number) and int(number)):
            raise InvalidRequest("X-Session-Step is not the number of a step; the first step is 1.")
        if last is not None and last.lower() not in ("true", "false"):
            raise InvalidRequest("X-Session-End must be `true` or `false`.")
        return StepRequest(
            inference,
            exchange,
            record,
            session,
            lambda deadline: read_inference(exchange, session.pipeline, self._limits, deadline),
            None if number is None else int(number),
            last is not None and last.lower() == "true",
            exchange.cancelled_on_disconnect(),
        )


def _rounded(seconds: float) -> float:
    """Rounds down, to milliseconds."""
    return int(seconds * 1000) / 1000


def _stateful(visible: openapi.Visible) -> Sequence[Pipeline]:
    return [each for each in visible.pipelines if not each.spec.takes_requests]


def _open_operations(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    possible = (
        *(errors.UnknownPipeline, errors.TooManyRequests),
        *(errors.ModelNotReady, errors.UpstreamUnavailable, errors.Draining, HttpSessionsOff),
    )
    opened = openapi.json_answer("The session is open", SessionOpened, "Location") | links("run_step", "delete_session")
    for each in _stateful(visible):
        summary = each.spec.description or f"Open a session of {each.spec.model}"
        yield openapi.Operation(
            f"open_session_{each.name}", each.name, {201: opened}, possible, path=each.name, summary=summary
        )


def _run_operations(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    if stateful := _stateful(visible):
        results = one_of([*map(result_of, stateful)], "anyOf")
        ok = openapi.json_answer("The outputs of the session's pipeline", results, *_ANSWER_HEADERS)
        yield _step("run_step", stateful, ok)


def _stream_operations(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    if streaming := [each for each in _stateful(visible) if each.spec.stream is not None]:
        outputs = one_of([*map(output_of, streaming)], "anyOf")
        yield _step("stream_step", streaming, events_answer(outputs, "X-Session-Step"))


def _delete_operations(visible: openapi.Visible) -> Iterator[openapi.Operation]:
    if _stateful(visible):
        ended = {204: openapi.answer("The session has ended")}
        yield openapi.Operation("delete_session", "sessions", ended, (UnknownSession, SessionLost), [_ID])


def _step(name: str, pipelines: Sequence[Pipeline], ok: Schema) -> openapi.Operation:
    content = {name: each for pipeline in pipelines for name, each in content_of(pipeline).items()}
    content["application/json"] = {"schema": one_of([*map(request_of, pipelines)], "anyOf")}
    possible = (UnknownSession, SessionLost, StepOutOfTurn, *openapi.INFERENCE_ERRORS)
    return openapi.Operation(
        name, "sessions", {200: ok}, possible, [_ID, openapi.TIMEOUT_HEADER, *_STEP_HEADERS], content
    )
