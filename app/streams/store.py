"""The port to stores of resumable streams: a stream is started once, and can be read repeatedly by its id.

Repeated starts with the same key return the same stream.
"""

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, Self

from app.core.errors import TooManyRequests
from app.core.repeats import RepeatKey, Repeats
from app.streams.events import Event, EventLog
from app.streams.quota import Agenda, KeepLimits, KeepQuota, KeptStream, Usage
from app.streams.stream import Stream

LONGEST_START_S = 30.0
"""How long a repeated start waits for the first one, which may wait for a slot of its model."""


@dataclass(frozen=True, slots=True)
class StartedStream:
    id: str
    request_id: str


def new_stream_id() -> str:
    """128 random bits. A stream id is a bearer capability: anyone who has it can read and cancel the stream."""
    return secrets.token_urlsafe(16)


class Reader(Protocol):
    """One connection to a stream; while it is open, the stream has a reader."""

    is_full: bool
    """Always False, because a stream does not wait for its readers."""

    async def resume(self, after: int) -> bool:
        """Whether an event after ``after`` exists or can follow. Called once, before :meth:`read`.

        Raises StreamEvicted if the next event has been dropped, InvalidRequest if ``after`` was never sent,
        UpstreamUnavailable if the store does not answer.
        """

    async def read(self, after: int) -> list[Event]:
        """Waits for the events after ``after``, at least one. Raises StreamEvicted or UpstreamUnavailable."""

    async def close(self) -> None: ...


class StreamStore(ABC):
    """Keeps streams within its limits. Ended streams without a reader are evicted for others."""

    def __init__(self, limits: KeepLimits, starts: Repeats[StartedStream]) -> None:
        self._quota = KeepQuota(limits)
        self._agenda = Agenda()
        self._repeats = starts
        self.release = starts.release

    async def claim(self, start: RepeatKey) -> StartedStream | None:
        """Returns the stream that was started with this key and is still kept; None if the key is this request's now.

        Raises the errors of :meth:`Repeats.claim`.
        """
        late = TooManyRequests("Another request with this Idempotency-Key is starting the stream.")
        return await self._repeats.claim(start, LONGEST_START_S, late)

    @property
    def usage(self) -> Usage:
        """What this process keeps for all of its streams."""
        return self._quota.total

    @abstractmethod
    def new_log(self) -> EventLog:
        """Creates the log of a stream for :meth:`keep`."""

    async def require_room(self, caller: str) -> None:
        """Checks whether a further stream can be kept. Call it before the stream takes a slot of its model.

        Raises TooManyRequests or UpstreamUnavailable.
        """
        if not await self._make_room(caller, streams=1):
            raise self._quota.refusal(caller)

    async def _make_room(self, caller: str, streams: int = 0) -> bool:
        """Evicts streams until these further streams fit. Returns whether they do."""
        while self._quota.is_over(caller, streams):
            victim = self._quota.victim(caller, streams)
            if victim is None:
                return False
            await self._evict(victim)
        return True

    @abstractmethod
    async def _evict(self, victim: KeptStream) -> None:
        """Drops an ended stream, or marks it as not evictable if it has a reader."""

    @abstractmethod
    async def keep(self, stream: Stream, resume_s: float, caller: str = "", start: RepeatKey | None = None) -> str:
        """Stores a stream before its start and returns its id. Raises TooManyRequests or UpstreamUnavailable.

        ``caller``: the id of the API key that starts the stream; empty without one. ``start``: a claimed key.
        After ``resume_s`` seconds without a reader, a running stream is ended and an ended stream is deleted.
        """

    @abstractmethod
    async def reader(self, stream_id: str) -> Reader:
        """Raises UnknownStream, StreamEvicted or UpstreamUnavailable."""

    @abstractmethod
    async def caller_of(self, stream_id: str) -> str:
        """The id of the API key that started the stream; empty without one.

        Raises UnknownStream, StreamEvicted or UpstreamUnavailable.
        """

    @abstractmethod
    async def delete(self, stream_id: str) -> None:
        """Ends and deletes a stream. Raises UnknownStream, StreamEvicted or UpstreamUnavailable."""

    @abstractmethod
    async def run(self) -> None:
        """Runs the store's background work until it is cancelled. Raises unexpected exceptions."""

    async def __aenter__(self) -> Self:
        """Does not wait for the store: without it, the gateway serves everything but resumable streams."""
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...
