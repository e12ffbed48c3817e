"""The port to stores of resumable streams: a stream is started once, and can be read repeatedly by its id."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import inf
from typing import Protocol, Self, TypeVar

from msgspec import Struct

from app.core.errors import StreamEvicted, UnknownStream
from app.streams.events import Event, EventLog
from app.streams.quota import KeepLimits, KeepQuota, KeptStream, Usage
from app.streams.stream import Stream

Kept = TypeVar("Kept", bound=KeptStream)


class StartedStream(Struct, frozen=True):
    """``keep_s``: how long it is kept at least if its model uses all of its time, and nobody reads it."""

    id: str
    request_id: str
    keep_s: float


def new_stream_id() -> str:
    """128 random bits. A stream id is a bearer capability: anyone who has it can read and cancel the stream."""
    return secrets.token_urlsafe(16)


def unknown() -> UnknownStream:
    return UnknownStream("There is no such stream, or it has expired.")


def due(streams: Iterable[Kept]) -> list[Kept]:
    """The streams whose time has come. Each is due once."""
    now = time.monotonic()
    found = [each for each in streams if each.due_at <= now]
    for each in found:
        each.due_at = inf
    return found


class Reader(Protocol):
    """One connection to a stream; while it is open, the stream has a reader."""

    is_full: bool
    """Always False, because a stream does not wait for its readers."""

    async def read(self, after: int) -> list[Event]:
        """Waits for the events after ``after``, at least one. Raises StreamEvicted or UpstreamUnavailable."""

    async def close(self) -> None: ...


class Notes(Protocol):
    """Short texts that the processes of all gateways share. Every method raises UpstreamUnavailable."""

    async def claim(self, name: str, note: bytes, keep_s: float) -> bytes | None:
        """Writes a note unless there is one. Returns the one that is there."""

    async def replace(self, name: str, before: bytes, after: bytes, keep_s: float = 0.0) -> None:
        """Replaces a note if it is still ``before``. An empty ``after`` removes it."""


class StreamStore(ABC):
    """Keeps streams within its limits. Ended streams without a reader are evicted for others."""

    notes: Notes | None = None
    """None if only this process knows the streams."""

    def __init__(self, limits: KeepLimits) -> None:
        self._quota = KeepQuota(limits)

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

    async def _make_room(self, caller: str, streams: int = 0, size: int = 0) -> bool:
        """Evicts streams until these further streams and bytes fit. Returns whether they do."""
        while self._quota.is_over(caller, streams, size):
            victim = self._quota.victim(caller, streams, size)
            if victim is None:
                return False
            await self._evict(victim)
        return True

    @abstractmethod
    async def _evict(self, victim: KeptStream) -> None:
        """Drops an ended stream, or marks it as not evictable if it has a reader."""

    @abstractmethod
    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        """Stores a stream before its start and returns its id. Raises TooManyRequests or UpstreamUnavailable.

        ``caller``: the id of the API key that starts the stream; empty without one.
        After ``resume_s`` seconds without a reader, a running stream is ended and an ended stream is deleted.
        """

    @abstractmethod
    async def reader(self, stream_id: str, after: int = 0) -> Reader | None:
        """A reader of the events after ``after``; None if the stream has ended and has no such event.

        Raises UnknownStream, StreamEvicted if the next event has been dropped, InvalidRequest if ``after`` was never
        sent, or UpstreamUnavailable.
        """

    @abstractmethod
    async def caller_of(self, stream_id: str) -> str:
        """The id of the API key that started the stream; empty without one.

        Raises UnknownStream, StreamEvicted or UpstreamUnavailable.
        """

    async def has(self, stream_id: str) -> bool:
        """Raises UpstreamUnavailable."""
        try:
            await self.caller_of(stream_id)
        except (UnknownStream, StreamEvicted):
            return False
        return True

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
