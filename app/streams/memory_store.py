"""The in-memory store: a stream can be resumed only in the process that started it.

The idempotency keys of the streams in :class:`app.streams.memory_store.MemoryStore`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from app.core.errors import StreamCancelled, UnknownStream
from app.streams.events import Event, EventLog, ReplayLog
from app.streams.quota import KEEP_LIMITS, STREAM_BYTES, EvictedStreams, KeepLimits, KeepQuota, KeptStream, Usage
from app.streams.store import LONGEST_START_S, StartedStream, StartKey, key_reused, new_stream_id, start_in_progress
from app.streams.stream import Stream


@dataclass(slots=True, eq=False)
class _Start:
    digest: str
    changed: asyncio.Event
    """Set when the stream was started, or its start failed."""
    started: StartedStream | None = None


class MemoryStarts:
    """Has one entry for each running start and for each kept stream with a key."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], _Start] = {}

    async def claim(self, start: StartKey) -> StartedStream | None:
        """Returns the stream that was started with this key; None if the key belongs to this request now.

        Raises IdempotencyKeyReused or TooManyRequests.
        """
        try:
            async with asyncio.timeout(LONGEST_START_S):
                while (known := self._starts.get((start.caller, start.key))) is not None:
                    if known.digest != start.digest:
                        raise key_reused()
                    if known.started is not None:
                        return known.started
                    await known.changed.wait()
        except TimeoutError as exc:
            raise start_in_progress() from exc
        self._starts[start.caller, start.key] = _Start(start.digest, asyncio.Event())
        return None

    def started(self, start: StartKey, stream: StartedStream) -> None:
        known = self._starts[start.caller, start.key]
        known.started = stream
        known.changed.set()

    def release(self, start: StartKey) -> None:
        """Frees a claimed key whose stream was not started."""
        if self._starts[start.caller, start.key].started is None:
            self.forget(start)

    def forget(self, start: StartKey) -> None:
        """Called when the stream is not kept any more."""
        self._starts.pop((start.caller, start.key)).changed.set()


FREED_BYTES = 1024 * 1024
"""Dropped streams are reported when they used this much together."""


@dataclass(slots=True, eq=False)
class _Kept:
    entry: KeptStream
    log: ReplayLog
    resume_s: float
    stream: Stream | None
    """None after the end: then only the events are kept."""
    start: StartKey | None
    readers: int = 0
    idle: asyncio.TimerHandle | None = None


class MemoryStore:
    """Implements :class:`app.streams.store.StreamStore`.

    ``freed`` is called with a number of bytes when as many were freed, FREED_BYTES or more.
    """

    def __init__(self, limits: KeepLimits = KEEP_LIMITS, freed: Callable[[int], None] | None = None) -> None:
        self._kept: dict[str, _Kept] = {}
        self._report_freed = freed
        self._freed = 0
        self._quota = KeepQuota(limits)
        self._evicted = EvictedStreams()
        self._starts = MemoryStarts()

    @property
    def usage(self) -> Usage:
        return self._quota.total

    def new_log(self) -> EventLog:
        return ReplayLog()

    async def require_room(self, caller: str) -> None:
        """Evicts ended streams until a further one fits."""
        while self._quota.is_over(caller, streams=1):
            victim = self._quota.victim(caller, streams=1)
            if victim is None:
                raise self._quota.refusal(caller)
            self._evict(victim)

    async def claim(self, start: StartKey) -> StartedStream | None:
        return await self._starts.claim(start)

    async def release(self, start: StartKey) -> None:
        self._starts.release(start)

    async def keep(self, stream: Stream, resume_s: float, caller: str = "", start: StartKey | None = None) -> str:
        assert isinstance(stream.log, ReplayLog), "the stream was made with this store's log"
        await self.require_room(caller)
        stream_id = new_stream_id()
        kept = self._kept[stream_id] = _Kept(KeptStream(stream_id, caller), stream.log, resume_s, stream, start)
        if start is not None:
            self._starts.started(start, StartedStream(stream_id, stream.request_id))
        self._quota.add(kept.entry)
        stream.log.changed = partial(self._log_changed, kept)
        self._await_reader(kept)
        return stream_id

    async def reader(self, stream_id: str) -> "MemoryReader":
        kept = self._found(stream_id)
        kept.readers += 1
        self._quota.mark(kept.entry, evictable=False)
        if kept.idle is not None:
            kept.idle.cancel()
        return MemoryReader(self, kept)

    async def caller_of(self, stream_id: str) -> str:
        return self._found(stream_id).entry.caller

    async def delete(self, stream_id: str) -> None:
        kept = self._found(stream_id)
        self._forget(kept)
        if kept.stream is not None:
            kept.stream.end(StreamCancelled("The stream was cancelled with DELETE."))

    async def run(self) -> None:
        await asyncio.Event().wait()

    def left(self, kept: _Kept) -> None:
        """Called when a reader closes."""
        kept.readers -= 1
        if not kept.readers and kept.entry.id in self._kept:
            self._quota.mark(kept.entry, evictable=kept.log.has_ended)
            self._await_reader(kept)

    async def __aenter__(self) -> Self:
        return self

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
        while self._quota.is_over(kept.entry.caller):
            victim = self._quota.victim(kept.entry.caller)
            if victim is not None:
                self._evict(victim)
            elif not self._shrink_largest(kept.entry.caller):
                break
        if kept.log.has_ended:
            kept.stream = None
            self._quota.mark(kept.entry, evictable=not kept.readers)

    def _shrink_largest(self, caller: str) -> bool:
        """Returns whether the largest stream dropped events; only a stream of this caller if its share is used up."""
        is_own = self._quota.is_share_used_up(caller)
        candidates = (each for each in self._kept.values() if not is_own or each.entry.caller == caller)
        largest = max(candidates, key=lambda each: each.entry.size)
        has_shrunk = largest.log.drop_older_half()
        self._account(largest)
        return has_shrunk

    def _account(self, kept: _Kept) -> None:
        self._quota.grow(kept.entry, STREAM_BYTES + kept.log.size - kept.entry.size)

    def _evict(self, victim: KeptStream) -> None:
        self._forget(self._kept[victim.id])
        self._evicted.add(victim.id)

    def _await_reader(self, kept: _Kept) -> None:
        kept.idle = asyncio.get_running_loop().call_later(kept.resume_s, self._nobody_came, kept)

    def _nobody_came(self, kept: _Kept) -> None:
        if kept.stream is None:
            self._forget(kept)
            return
        kept.stream.end(StreamCancelled(f"No client read the stream for {kept.resume_s:g} s."))
        self._await_reader(kept)

    def _forget(self, kept: _Kept) -> None:
        if kept.idle is not None:
            kept.idle.cancel()
        kept.log.changed = None  # a cycle, which would keep the events until the next full garbage collection
        del self._kept[kept.entry.id]
        if kept.start is not None:
            self._starts.forget(kept.start)
        self._quota.remove(kept.entry)
        self._freed += kept.entry.size
        if self._report_freed is not None and self._freed >= FREED_BYTES:
            self._report_freed(self._freed)
            self._freed = 0


class MemoryReader:
    """Implements :class:`app.streams.store.Reader`."""

    def __init__(self, store: MemoryStore, kept: _Kept) -> None:
        self._store = store
        self._kept = kept

    @property
    def is_full(self) -> bool:
        return False

    async def resume(self, after: int) -> bool:
        return self._kept.log.resume(after)

    async def read(self, after: int) -> list[Event]:
        return await self._kept.log.read(after)

    async def close(self) -> None:
        self._store.left(self._kept)
