"""Which Triton has which request, for requests that a ``cancel`` model may have to end."""

from collections import OrderedDict

from app.triton.server import Server

MOST = 10_000
"""So many requests are remembered, those that have ended among them: their cancellation may come later."""


class Places:
    def __init__(self) -> None:
        self._servers: OrderedDict[str, Server] = OrderedDict()

    def note(self, request_id: str, server: Server) -> None:
        self._servers[request_id] = server
        if len(self._servers) > MOST:
            self._servers.popitem(last=False)

    def of(self, request_id: str) -> Server | None:
        return self._servers.get(request_id)
