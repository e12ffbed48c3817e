"""Streams that outlive a connection: started once, read by anyone who holds the id, as often as needed."""

import secrets
from typing import Protocol, Self

from app.streams.event import Event
from app.streams.log import EventLog
from app.streams.stream import Stream


def new_stream_id() -> str:
    """128 random bits: who has the id may read and cancel the stream."""
    return secrets.token_urlsafe(16)


class StoreUnusable(Exception):
    """The store cannot be had at the start; the message says why, without a password."""


class Reader(Protocol):
    """One connection to a stream; while it is open, the stream has a reader."""

    async def resume(self, after: int) -> bool:
        """Whether anything is left to read behind ``after``.

        Raises StreamEvicted where the next event is gone, InvalidRequest where ``after`` was never sent,
        UpstreamUnavailable where the store is away.
        """

    async def read(self, after: int) -> list[Event]:
        """The events behind ``after``, at least one, waiting for it. Raises StreamEvicted or UpstreamUnavailable."""

    async def close(self) -> None: ...


class StreamStore(Protocol):
    def new_log(self) -> EventLog:
        """The log that a stream to be kept is made with."""

    async def keep(self, stream: Stream, resume_s: float) -> str:
        """Keeps a stream that is about to be started and returns its id. Raises UpstreamUnavailable.

        Without a reader for ``resume_s`` seconds it is ended if it runs, and forgotten if it has ended.
        """

    async def reader(self, stream_id: str) -> Reader:
        """Raises UnknownStream or UpstreamUnavailable."""

    async def delete(self, stream_id: str) -> None:
        """Ends and forgets a stream. Raises UnknownStream or UpstreamUnavailable."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
