"""The work in progress: requests from their admission to their last byte, and running streams."""

import asyncio
from collections import Counter
from typing import Protocol

from app.core.errors import Draining, GatewayError
from app.observability.record import RequestRecord


class Work(Protocol):
    def end(self, cause: GatewayError) -> None:
        """Ends the work as soon as possible and reports ``cause`` to the caller. No-op if the work has ended."""


class StandingWork(Work, Protocol):
    def drain(self) -> None:
        """Takes nothing more, and ends when nothing is under way."""


class Workload:
    """The work in progress. The drain waits until it is empty."""

    def __init__(self) -> None:
        self.is_delaying = False
        """True after the first signal: work is still admitted, while load balancers remove the gateway."""
        self.is_draining = False
        """True after the drain has started: new work is rejected."""
        self._running: set[Work] = set()
        self._standing: set[StandingWork] = set()
        self._idle: asyncio.Event | None = None
        """Created by the first call of :meth:`idle`, so that before the drain no request has to set it."""

    @property
    def is_shutting_down(self) -> bool:
        """Whether the gateway is not ready any more."""
        return self.is_delaying or self.is_draining

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, work: Work) -> None:
        """Adds new work. Raises Draining."""
        if self.is_draining:
            raise Draining("The gateway is shutting down; send the request again.")
        self._running.add(work)

    def add(self, work: Work) -> None:
        """Adds work that also runs during the drain."""
        self._running.add(work)

    def add_standing(self, work: StandingWork) -> None:
        """Adds work that would not end by itself, such as a WebSocket."""
        self._standing.add(work)
        self._running.add(work)
        if self.is_draining:
            work.drain()

    def remove(self, work: Work) -> None:
        """No-op if ``work`` was never added."""
        self._running.discard(work)
        if self._standing:
            self._standing.discard(work)
        if self._idle is not None and not self._running:
            self._idle.set()

    def start_draining(self) -> None:
        self.is_draining = True
        for work in tuple(self._standing):
            work.drain()

    def unary_requests(self) -> Counter[str]:
        """The number of unary requests of each pipeline."""
        records = (work.record for work in self._running if isinstance(work, RequestWork))
        return Counter(record.pipeline for record in records if record.transport == "unary")

    async def idle(self) -> None:
        """Waits until no work is in progress."""
        self._idle = self._idle or asyncio.Event()
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    def end_all(self, cause: GatewayError) -> None:
        for work in tuple(self._running):
            work.end(cause)


class RequestWork:
    """One HTTP request, handled by the current task."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_answering = False
        """True after the status was sent: the request is not interrupted any more."""
        self._cause: GatewayError | None = None

    def end(self, cause: GatewayError) -> None:
        if self._cause is None and not self.is_answering:
            self._cause = cause
            self.task.cancel()

    def cause_of_cancellation(self) -> GatewayError | None:
        """Returns why :meth:`end` cancelled the task; None if something else cancelled it.

        Clears the task's cancellation, so that it can answer.
        """
        if self._cause is not None:
            self.task.uncancel()
        return self._cause
