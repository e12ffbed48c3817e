"""Cancels the work of a request when its client disconnects."""

import asyncio
from types import TracebackType

from app.api.exchange import Exchange
from app.core.errors import ClientClosedRequest


class CancelledOnDisconnect:
    """Cancels the block when the client disconnects, and raises ClientClosedRequest. Needs no further task.

    The block runs in the task of the request.
    """

    __slots__ = ("_connection", "_is_lost", "_task")

    def __init__(self, exchange: Exchange) -> None:
        self._connection = exchange.connection
        self._task = exchange.task
        self._is_lost = False

    def __enter__(self) -> None:
        self._connection.on_lost = self._cancel
        if self._connection.is_lost:
            self._cancel()

    def __exit__(
        self, _kind: type[BaseException] | None, exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._connection.on_lost = None
        if self._is_lost and isinstance(exc, asyncio.CancelledError):
            self._task.uncancel()
            raise ClientClosedRequest("The client disconnected before the answer was ready.") from None

    def _cancel(self) -> None:
        self._is_lost = True
        self._task.cancel()
