"""Passes the requests of a session on to the worker that has the session, over a Unix socket."""

import asyncio
import re
from functools import cache
from typing import get_args

import httpx
from starlette.responses import Response

from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange, Header
from app.api.limits import Limits
from app.api.pipelines.session_streams import LeavableLog
from app.api.problems import problem_of
from app.api.streaming import MEDIA_TYPE, Start, StreamResponse
from app.core.errors import GatewayError, SessionLost, TooManyRequests
from app.core.json import json_of
from app.sessions.home import SessionHome
from app.streams.events import Event, EventName

STEP = b"x-session-step"
PASSED = b"x-session-passed"
"""A request that another worker has passed on. It is not passed on again."""
_NOT_SENT = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"}
)
_NOT_ANSWERED = frozenset(
    {*_NOT_SENT, b"date", b"server", b"x-request-id", b"server-timing", b"vary", b"timing-allow-origin"}
)
"""Headers of an answer that this worker sets itself."""


class SessionPassing:
    def __init__(self, home: SessionHome) -> None:
        self._home = home
        self._client_of = cache(self._new_client)

    async def answer_of(self, number: int, exchange: Exchange, body: bytes = b"") -> Response:
        """Returns the answer of another worker. Raises SessionLost if the worker has ended."""
        return _whole(await self._sent(number, exchange, body))

    async def stream_of(self, number: int, exchange: Exchange, body: bytes, limits: Limits) -> Response:
        """Returns the answer of another worker, which may be a stream. Raises SessionLost if the worker has ended."""
        found = await self._sent(number, exchange, body, is_stream=True)
        if not found.headers.get("content-type", "").startswith(MEDIA_TYPE):
            await found.aread()
            return _whole(found)
        stream = PassedStream(found, exchange.record.request_id)
        answer = StreamResponse(stream.log, limits, start=Start(), on_left=stream.leave, closing=stream.close)
        answer.raw_headers = [*answer.raw_headers, *[each for each in _headers_of(found) if each[0] == STEP]]
        return answer

    async def _sent(self, number: int, exchange: Exchange, body: bytes, *, is_stream: bool = False) -> httpx.Response:
        with CancelledOnDisconnect(exchange):
            try:
                return await self._client_of(number).send(_request_of(exchange, body), stream=is_stream)
            except httpx.TransportError as exc:
                raise _worker_has_ended() from exc

    async def opened_elsewhere(self, exchange: Exchange, refusal: TooManyRequests) -> Response:
        """Opens a session in another worker, because this one has no place. Raises the refusal if none has."""
        others = [] if exchange.header(PASSED) else self._home.others
        for number in others:
            try:
                answer = await self.answer_of(number, exchange)
            except SessionLost:
                continue
            if answer.status_code == 201:
                return answer
        raise refusal

    def _new_client(self, number: int) -> httpx.AsyncClient:
        """Without time limits: the owner of the session has them."""
        transport = httpx.AsyncHTTPTransport(
            uds=self._home.socket_of(number), limits=httpx.Limits(max_connections=None)
        )
        return httpx.AsyncClient(transport=transport, timeout=None)


class PassedStream:
    """The events of a stream of another worker, with a terminal event also if that worker is killed."""

    def __init__(self, answer: httpx.Response, request_id: str) -> None:
        self._answer = answer
        self._request_id = request_id
        self._reading = asyncio.create_task(self._read())
        self.log = LeavableLog()

    def leave(self, cause: GatewayError) -> None:
        """Ends the events with an error, and the connection to the worker. No-op if the events have ended."""
        self.log.end(json_of(problem_of(cause, self._request_id)))
        self._reading.cancel()

    async def close(self) -> None:
        """Reads to the end of the answer after its terminal event, so that the connection can be used again."""
        if not self.log.has_ended:
            self._reading.cancel()
        try:
            await asyncio.wait([self._reading])
        finally:
            await self._answer.aclose()

    async def _read(self) -> None:
        received = bytearray()
        try:
            async for part in self._answer.aiter_raw():
                searched = max(len(received) - 1, 0)
                received += part
                while (end := received.find(b"\n\n", searched)) >= 0:
                    if frame := _FRAME.fullmatch(received, 0, end):
                        number, name, data = frame.groups()
                        self.log.append(Event(int(number), _NAMES[name], bytes(data)))
                    del frame, received[: end + 2]
                    searched = 0
                await self.log.room()
        except httpx.TransportError:
            pass
        self.leave(_worker_has_ended())


_FRAME = re.compile(rb"id: ([0-9]+)\nevent: ([a-z]+)\ndata: (.*)", re.DOTALL)
_NAMES: dict[bytes, EventName] = {name.encode(): name for name in get_args(EventName)}


def _worker_has_ended() -> SessionLost:
    return SessionLost("The process that had the session has ended.")


def _whole(found: httpx.Response) -> Response:
    answer = Response(found.content, found.status_code)
    answer.raw_headers += _headers_of(found)
    return answer


def _request_of(exchange: Exchange, body: bytes) -> httpx.Request:
    scope = exchange.scope
    headers = [each for each in scope["headers"] if each[0] not in _NOT_SENT | {b"x-request-id"}]
    headers += [(b"x-request-id", exchange.record.request_id.encode()), (PASSED, b"1")]
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    url = httpx.URL("http://worker").copy_with(raw_path=scope["raw_path"] + query)
    return httpx.Request(scope["method"], url, headers=headers, content=body)


def _headers_of(answer: httpx.Response) -> list[Header]:
    return [
        (name, value)
        for name, value in ((name.lower(), value) for name, value in answer.headers.raw)
        if name not in _NOT_ANSWERED and not name.startswith(b"access-control-")
    ]
