"""The work in progress: requests from their admission to their last byte, and running streams."""

import asyncio
from typing import Protocol

from app.core.errors import Draining, GatewayError


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
        self.running: set[Work] = set()
        self._standing: set[StandingWork] = set()
        self._idle: asyncio.Event | None = None
        """Created by the first call of :meth:`idle`, so that before the drain no request has to set it."""

    @property
    def is_shutting_down(self) -> bool:
        """Whether the gateway is not ready any more."""
        return self.is_delaying or self.is_draining

    def __len__(self) -> int:
        return len(self.running)

    def begin(self, work: Work) -> None:
        """Adds new work. Raises Draining."""
        if self.is_draining:
            raise Draining("The gateway is shutting down; send the request again.")
        self.running.add(work)

    def add(self, work: Work) -> None:
        """Adds work that also runs during the drain."""
        self.running.add(work)

    def add_standing(self, work: StandingWork) -> None:
        """Adds work that would not end by itself, such as a WebSocket."""
        self._standing.add(work)
        self.running.add(work)
        if self.is_draining:
            work.drain()

    def remove(self, work: Work) -> None:
        """No-op if ``work`` was never added."""
        self.running.discard(work)
        if self._standing:
            self._standing.discard(work)
        if self._idle is not None and not self.running:
            self._idle.set()

    def start_draining(self) -> None:
        self.is_draining = True
        for work in tuple(self._standing):
            work.drain()

    async def idle(self) -> None:
        """Waits until no work is in progress."""
        self._idle = self._idle or asyncio.Event()
        while self.running:
            self._idle.clear()
            await self._idle.wait()

    def end_all(self, cause: GatewayError) -> None:
        for work in tuple(self.running):
            work.end(cause)
