"""The port to stores of resumable streams: a stream is started once, and can be read repeatedly by its id.

The start of a stream with an idempotency key: repeated starts return the same stream.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, Self

from app.core.errors import IdempotencyKeyReused, TooManyRequests
from app.streams.events import Event, EventLog
from app.streams.quota import Agenda, KeepLimits, KeepQuota, KeptStream, Usage
from app.streams.stream import Stream

LONGEST_START_S = 30.0
"""How long a repeated start waits for the first one, which may wait for a slot of its model."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class StartKey:
    """``caller``: the id of the API key; empty without one. ``digest``: of the body, to recognize another request."""

    caller: str
    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class StartedStream:
    id: str
    request_id: str


def key_reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        "This Idempotency-Key was sent with another body.", hint="Use a new key, such as a UUID, for each new request."
    )


class Starts(ABC):
    """The idempotency keys of streams."""

    async def claim(self, start: StartKey) -> StartedStream | None:
        """Returns the stream that was started with this key and is still kept.

        None: the key is new, or its stream is gone, and belongs to this request now, which must keep its stream or
        call :meth:`release`. Waits while another request starts the stream.

        Raises IdempotencyKeyReused, TooManyRequests or UpstreamUnavailable.
        """
        ends = time.monotonic() + LONGEST_START_S
        while time.monotonic() < ends:
            claimed = await self._claimed(start)
            if claimed is None:
                return None
            digest, started = claimed
            if digest != start.digest:
                raise key_reused()
            if started is not None:
                return started
            await asyncio.sleep(POLL_S)
        raise TooManyRequests("Another request with this Idempotency-Key is starting the stream.")

    @abstractmethod
    async def release(self, start: StartKey) -> None:
        """Frees a claimed key whose stream was not started. Raises UpstreamUnavailable."""

    @abstractmethod
    async def _claimed(self, start: StartKey) -> tuple[str, StartedStream | None] | None:
        """Returns the digest of the earlier claim of this key, and its stream if that was started.

        None: the key belongs to this request now.
        """


def new_stream_id() -> str:
    """128 random bits. A stream id is a bearer capability: anyone who has it can read and cancel the stream."""
    return secrets.token_urlsafe(16)


class StoreUnusable(Exception):
    """The store cannot be used with this installation. The message has the reason."""


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

    def __init__(self, limits: KeepLimits, starts: Starts) -> None:
        self._quota = KeepQuota(limits)
        self._agenda = Agenda()
        self.claim, self.release = starts.claim, starts.release

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
    async def keep(self, stream: Stream, resume_s: float, caller: str = "", start: StartKey | None = None) -> str:
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
