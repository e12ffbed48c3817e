"""The in-memory store: a stream can be resumed only in the process that started it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.core.errors import StreamCancelled, UnknownStream
from app.core.repeats import MemoryRepeats, RepeatKey
from app.streams.events import Event, EventLog, ReplayLog
from app.streams.quota import (
    KEEP_LIMITS,
    STREAM_BYTES,
    EvictedStreams,
    KeepLimits,
    KeptStream,
)
from app.streams.store import StartedStream, StreamStore, new_stream_id
from app.streams.stream import Stream

FREED_BYTES = 1024 * 1024
"""Dropped streams are reported when they used this much together."""


SWEEP_S = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class _Kept(KeptStream):
    log: ReplayLog
    resume_s: float
    stream: Stream | None
    """None after the end: then only the events are kept."""
    start: RepeatKey | None
    readers: int = 0


class MemoryStore(StreamStore):
    """``freed`` is called with a number of bytes when as many were freed, FREED_BYTES or more."""

    def __init__(self, limits: KeepLimits = KEEP_LIMITS, freed: Callable[[int], None] | None = None) -> None:
        self._starts = MemoryRepeats[StartedStream]()
        super().__init__(limits, self._starts)
        self._kept: dict[str, _Kept] = {}
        self._report_freed = freed
        self._freed = 0
        self._evicted = EvictedStreams()

    def new_log(self) -> EventLog:
        return ReplayLog()

    async def keep(self, stream: Stream, resume_s: float, caller: str = "", start: RepeatKey | None = None) -> str:
        assert isinstance(stream.log, ReplayLog), "the stream was made with this store's log"
        await self.require_room(caller)
        stream_id = new_stream_id()
        kept = _Kept(stream_id, caller, log=stream.log, resume_s=resume_s, stream=stream, start=start)
        self._kept[stream_id] = kept
        if start is not None:
            self._starts.keep(start, StartedStream(stream_id, stream.request_id))
        self._quota.add(kept)
        stream.log.changed = partial(self._log_changed, kept)
        self._await_reader(kept)
        return stream_id

    async def reader(self, stream_id: str) -> "MemoryReader":
        kept = self._found(stream_id)
        kept.readers += 1
        self._quota.mark(kept, evictable=False)
        return MemoryReader(self, kept)

    async def caller_of(self, stream_id: str) -> str:
        return self._found(stream_id).caller

    async def delete(self, stream_id: str) -> None:
        kept = self._found(stream_id)
        self._forget(kept)
        if kept.stream is not None:
            kept.stream.end(StreamCancelled("The stream was cancelled with DELETE."))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for stream_id in self._agenda.due():
                kept = self._kept.get(stream_id)
                if kept is None or kept.readers:
                    continue
                if kept.stream is None:
                    self._forget(kept)
                else:
                    kept.stream.end(StreamCancelled(f"No client read the stream for {kept.resume_s:g} s."))
                    self._await_reader(kept)

    def left(self, kept: _Kept) -> None:
        """Called when a reader closes."""
        kept.readers -= 1
        if not kept.readers and kept.id in self._kept:
            self._quota.mark(kept, evictable=kept.log.has_ended)
            self._await_reader(kept)

    async def __aexit__(self, *_: object) -> None:
        for kept in list(self._kept.values()):
            self._forget(kept)

    def _found(self, stream_id: str) -> _Kept:
        kept = self._kept.get(stream_id)
        if kept is None:
            self._evicted.check(stream_id)
            raise UnknownStream("There is no such stream, or it has expired.")
        return kept

    def _log_changed(self, kept: _Kept) -> None:
        """Accounts for new events. Makes room for them in ended streams, otherwise in the largest stream."""
        self._account(kept)
        while self._quota.is_over(kept.caller):
            victim = self._quota.victim(kept.caller)
            if victim is not None:
                self._drop(victim)
            elif not self._shrink_largest(kept.caller):
                break
        if kept.log.has_ended:
            kept.stream = kept.log.changed = None
            self._quota.mark(kept, evictable=not kept.readers)

    def _shrink_largest(self, caller: str) -> bool:
        """Returns whether the largest stream dropped events; only a stream of this caller if its share is used up."""
        is_own = self._quota.is_share_used_up(caller)
        candidates = (each for each in self._kept.values() if not is_own or each.caller == caller)
        largest = max(candidates, key=lambda each: each.size)
        has_shrunk = largest.log.drop_older_half()
        self._account(largest)
        return has_shrunk

    def _account(self, kept: _Kept) -> None:
        self._quota.grow(kept, STREAM_BYTES + kept.log.size - kept.size)

    async def _evict(self, victim: KeptStream) -> None:
        self._drop(victim)

    def _drop(self, victim: KeptStream) -> None:
        self._forget(self._kept[victim.id])
        self._evicted.add(victim.id)

    def _await_reader(self, kept: _Kept) -> None:
        self._agenda.set(kept.id, kept.resume_s)

    def _forget(self, kept: _Kept) -> None:
        kept.log.changed = None  # a cycle, which would keep the events until the next full garbage collection
        del self._kept[kept.id]
        if kept.start is not None:
            self._starts.forget(kept.start)
        self._quota.remove(kept)
        self._freed += kept.size
        if self._report_freed is not None and self._freed >= FREED_BYTES:
            self._report_freed(self._freed)
            self._freed = 0


class MemoryReader:
    """Implements :class:`app.streams.store.Reader`."""

    is_full = False

    def __init__(self, store: MemoryStore, kept: _Kept) -> None:
        self._store = store
        self._kept = kept

    async def resume(self, after: int) -> bool:
        return self._kept.log.resume(after)

    async def read(self, after: int) -> list[Event]:
        return await self._kept.log.read(after)

    async def close(self) -> None:
        self._store.left(self._kept)
