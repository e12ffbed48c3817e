"""Streams that outlive a connection: started once, and read as often as needed with the stream's id."""

import secrets
from typing import Protocol, Self

from app.streams.event import Event
from app.streams.log import EventLog
from app.streams.stream import Stream


def new_stream_id() -> str:
    """128 random bits. A stream id is a bearer capability: whoever holds it may read and cancel the stream."""
    return secrets.token_urlsafe(16)


class StoreUnusable(Exception):
    """The store cannot be used at the start; the message says why, without a password."""


class Reader(Protocol):
    """One connection to a stream; while it is open, the stream has a reader."""

    @property
    def is_full(self) -> bool:
        """False: the stream waits for none of its readers."""

    async def resume(self, after: int) -> bool:
        """Whether there is, or will be, an event after ``after``. Called once, before :meth:`read`.

        Raises StreamEvicted if the next event has been dropped, InvalidRequest if ``after`` was never sent,
        UpstreamUnavailable if the store does not answer.
        """

    async def read(self, after: int) -> list[Event]:
        """Waits for the events after ``after``, at least one. Raises StreamEvicted or UpstreamUnavailable."""

    async def close(self) -> None: ...


class StreamStore(Protocol):
    def new_log(self) -> EventLog:
        """The log for a stream that :meth:`keep` will be given."""

    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        """Keeps a stream that is about to be started and returns its id. Raises UpstreamUnavailable.

        ``caller``: the id of the API key that starts the stream; empty without one.
        Without a reader for ``resume_s`` seconds it is ended if it runs, and forgotten if it has ended.
        """

    async def reader(self, stream_id: str) -> Reader:
        """Raises UnknownStream or UpstreamUnavailable."""

    async def caller_of(self, stream_id: str) -> str:
        """The id of the API key that started the stream; empty without one.

        Raises UnknownStream or UpstreamUnavailable.
        """

    async def delete(self, stream_id: str) -> None:
        """Ends and forgets a stream. Raises UnknownStream or UpstreamUnavailable."""

    async def run(self) -> None:
        """The store's background work, until it is cancelled. Raises whatever is not expected."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
