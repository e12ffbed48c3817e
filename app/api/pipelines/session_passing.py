"""Passes the requests of a session on to the worker that has the session, over a Unix socket."""

from functools import cache

import httpx
from starlette.responses import Response

from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange, Header
from app.core.errors import SessionLost, TooManyRequests
from app.sessions.home import SessionHome

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
        with CancelledOnDisconnect(exchange):
            try:
                found = await self._client_of(number).send(_request_of(exchange, body))
            except httpx.TransportError as exc:
                raise SessionLost("The process that had the session has ended.") from exc
        answer = Response(found.content, found.status_code)
        answer.raw_headers += _headers_of(found)
        return answer

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
