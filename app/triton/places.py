"""Remembers which Triton received a request, so that a ``cancel`` model can be called on the same server."""

from collections import OrderedDict

from app.triton.server import Server

MOST = 10_000
"""The number of requests to remember, including ended requests, whose cancellation may arrive later."""


class Places:
    def __init__(self) -> None:
        self._servers: OrderedDict[str, Server] = OrderedDict()

    def note(self, request_id: str, server: Server) -> None:
        self._servers[request_id] = server
        if len(self._servers) > MOST:
            self._servers.popitem(last=False)

    def of(self, request_id: str) -> Server | None:
        return self._servers.get(request_id)
