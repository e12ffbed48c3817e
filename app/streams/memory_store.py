"""The in-memory store: a stream can be resumed only in the process that started it."""

import asyncio
from dataclasses import dataclass
from typing import Self

from app.domain.errors import ClientClosedRequest, UnknownStream
from app.streams.event import Event
from app.streams.log import EventLog, ReplayLog
from app.streams.store import new_stream_id
from app.streams.stream import Stream


@dataclass(slots=True, eq=False)
class _Kept:
    stream: Stream
    log: ReplayLog
    resume_s: float
    caller: str
    readers: int = 0
    idle: asyncio.TimerHandle | None = None


class MemoryStore:
    """Implements :class:`app.streams.store.StreamStore`."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def new_log(self) -> EventLog:
        return ReplayLog()

    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        assert isinstance(stream.log, ReplayLog), "the stream was made with this store's log"
        stream_id = new_stream_id()
        kept = self._kept[stream_id] = _Kept(stream, stream.log, resume_s, caller)
        self._await_reader(stream_id, kept)
        return stream_id

    async def reader(self, stream_id: str) -> "MemoryReader":
        kept = self._found(stream_id)
        kept.readers += 1
        if kept.idle is not None:
            kept.idle.cancel()
        return MemoryReader(self, stream_id, kept)

    async def caller_of(self, stream_id: str) -> str:
        return self._found(stream_id).caller

    async def delete(self, stream_id: str) -> None:
        kept = self._found(stream_id)
        self._forget(stream_id, kept)
        kept.stream.end(ClientClosedRequest("The stream was deleted."))

    async def run(self) -> None:
        await asyncio.Event().wait()

    def left(self, stream_id: str, kept: _Kept) -> None:
        """Called when a reader closes."""
        kept.readers -= 1
        if not kept.readers and stream_id in self._kept:
            self._await_reader(stream_id, kept)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream_id, kept in list(self._kept.items()):
            self._forget(stream_id, kept)

    def _found(self, stream_id: str) -> _Kept:
        kept = self._kept.get(stream_id)
        if kept is None:
            raise UnknownStream("There is no such stream, or it has expired.")
        return kept

    def _await_reader(self, stream_id: str, kept: _Kept) -> None:
        kept.idle = asyncio.get_running_loop().call_later(kept.resume_s, self._nobody_came, stream_id, kept)

    def _nobody_came(self, stream_id: str, kept: _Kept) -> None:
        if kept.log.has_ended:
            self._forget(stream_id, kept)
            return
        kept.stream.end(ClientClosedRequest(f"No client read the stream for {kept.resume_s:g} s."))
        self._await_reader(stream_id, kept)

    def _forget(self, stream_id: str, kept: _Kept) -> None:
        if kept.idle is not None:
            kept.idle.cancel()
        del self._kept[stream_id]


class MemoryReader:
    """Implements :class:`app.streams.store.Reader`."""

    def __init__(self, store: MemoryStore, stream_id: str, kept: _Kept) -> None:
        self._store = store
        self._stream_id = stream_id
        self._kept = kept

    @property
    def is_full(self) -> bool:
        return False

    async def resume(self, after: int) -> bool:
        return self._kept.log.resume(after)

    async def read(self, after: int) -> list[Event]:
        return await self._kept.log.read(after)

    async def close(self) -> None:
        self._store.left(self._stream_id, self._kept)
