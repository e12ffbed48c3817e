"""CORS for every answer, also for one that an exchange sends directly to the connection."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send


class Cors(CORSMiddleware):
    """Must run inside EntryPoint: the request's exchange adds the headers to its answer."""

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        start: Message = {"type": "http.response.start", "headers": []}
        await self.send(start, _ignore, request_headers)
        scope["state"]["exchange"].cors_headers = start["headers"]
        await self.app(scope, receive, send)


async def _ignore(_message: Message) -> None:
    pass
