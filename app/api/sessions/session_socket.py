"""The WebSocket of a pipeline with sessions: each message is a step of one session, which ends with the WebSocket."""

from collections.abc import Callable
from typing import ClassVar

from app.api.call import Inference
from app.api.exchange import Exchange
from app.api.pipelines.socket_endpoints import read_message
from app.api.sessions.open_sessions import OpenSession
from app.api.sessions.session_steps import StepRequest
from app.api.sockets.socket import MessageHandler, Reply, whole_reply
from app.core.json import json_of
from app.http1.websocket import Message, Reason, WebSocket
from app.observability.record import RequestRecord
from app.sessions.session import End
from app.sessions.session_errors import SessionLost, UnknownSession
from app.streams.events import Event
from app.streams.stream import Done


class SessionReason(Reason):
    ENDED = "unknown_session", 4404
    LOST = "session_lost", 4410


class StepHandler(MessageHandler):
    """``check_key``: checks the key of the WebSocket again."""

    at_once = 1
    runs_in_drain = True
    reasons: ClassVar = {
        **MessageHandler.reasons,
        UnknownSession: SessionReason.ENDED,
        SessionLost: SessionReason.LOST,
    }

    def __init__(
        self, inference: Inference, session: OpenSession, exchange: Exchange, check_key: Callable[[Exchange], None]
    ) -> None:
        self._inference = inference
        self._session = session
        self._exchange = exchange
        self._check_key = check_key

    def opened(self, websocket: WebSocket) -> None:
        session = self._session

        def close() -> None:
            websocket.close(SessionReason.LOST if session.ended is End.LOST else SessionReason.ENDED)

        session.on_expired = close

    async def start(self, message: Message, record: RequestRecord) -> Reply:
        """Raises SessionLost, UnknownSession, and the errors of a step before its first output."""
        self._check_key(self._exchange)
        exchange, session = self._exchange, self._session
        step = StepRequest(
            exchange, record, session, lambda deadline: read_message(exchange, session.pipeline, message, deadline)
        )
        if session.pipeline.spec.stream is not None:
            stream = await step.stream(self._inference)
            return Reply(stream.log, stream.opening, stream.leave, stream.left)
        answer = await step.answer(self._inference)
        done: Done = {
            "reason": "complete" if answer.early_exit is None else "early_exit",
            "early_exit": answer.early_exit,
            "outputs": 1,
            "request_id": record.request_id,
        }
        return whole_reply(Event(1, "output", answer.body), Event(2, "done", json_of(done)))

    def closed(self) -> None:
        """The session is known for a while, and must not keep its WebSocket."""
        self._session.on_expired = None
        self._session.close(End.DELETED)
