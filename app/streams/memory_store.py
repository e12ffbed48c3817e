"""The in-memory store: a stream can be resumed only in the process that started it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.core.errors import StreamCancelled
from app.streams.events import EventLog, ReplayLog
from app.streams.store import (
    KEEP_LIMITS,
    STREAM_BYTES,
    KeepLimits,
    KeptStream,
    Reader,
    StreamStore,
    evicted,
    new_stream_id,
    unknown,
)
from app.streams.stream import Stream

FREED_BYTES = 1024 * 1024
"""Dropped streams are reported when they used this much together."""
SWEEP_S = 0.2
MAX_EVICTED = 10_000
"""Evicted streams whose readers get a reason."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Kept(KeptStream):
    log: ReplayLog
    resume_s: float
    stream: Stream | None
    """None after the end: then only the events are kept."""
    readers: int = 0

    def await_reader(self) -> None:
        self.due_at = time.monotonic() + self.resume_s


class MemoryStore(StreamStore):
    """``freed`` is called with a number of bytes when as many were freed, FREED_BYTES or more."""

    def __init__(self, limits: KeepLimits = KEEP_LIMITS, freed: Callable[[int], None] | None = None) -> None:
        super().__init__(limits)
        self._kept: dict[str, _Kept] = {}
        self._report_freed = freed
        self._freed = 0
        self._evicted: dict[str, None] = {}
        """The newest ids."""

    def new_log(self) -> EventLog:
        return ReplayLog()

    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        assert isinstance(stream.log, ReplayLog), "the stream was made with this store's log"
        await self.require_room(caller)
        kept = _Kept(new_stream_id(), caller, log=stream.log, resume_s=resume_s, stream=stream)
        self._kept[kept.id] = kept
        self._quota.add(kept)
        stream.log.changed = partial(self._log_changed, kept)
        kept.await_reader()
        return kept.id

    async def reader(self, stream_id: str, after: int = 0) -> Reader | None:
        kept = self._found(stream_id)
        if not kept.log.resume(after):
            return None
        self._read_by(kept, 1)
        return Reader(kept.log, partial(self._read_by, kept, -1))

    async def caller_of(self, stream_id: str) -> str:
        return self._found(stream_id).caller

    async def delete(self, stream_id: str) -> None:
        kept = self._found(stream_id)
        self._forget(kept)
        if kept.stream is not None:
            kept.stream.end(StreamCancelled("The stream was cancelled with DELETE."))

    async def run(self) -> None:
        """One sweep looks at all streams: none has a timer."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for kept in [each for each in self._kept.values() if each.due_at <= now]:
                if kept.stream is None:
                    self._forget(kept)
                else:
                    kept.stream.end(StreamCancelled(f"No client read the stream for {kept.resume_s:g} s."))
                    kept.await_reader()

    def _read_by(self, kept: _Kept, readers: int) -> None:
        """Called when a reader opens (1) or closes (-1)."""
        kept.readers += readers
        if kept.id in self._kept:
            self._quota.mark(kept, evictable=kept.log.has_ended and not kept.readers)
            kept.await_reader()
        if kept.readers:
            kept.due_at = float("inf")

    async def __aexit__(self, *_: object) -> None:
        for kept in list(self._kept.values()):
            self._forget(kept)

    def _found(self, stream_id: str) -> _Kept:
        kept = self._kept.get(stream_id)
        if kept is None:
            raise evicted() if stream_id in self._evicted else unknown()
        return kept

    def _log_changed(self, kept: _Kept) -> None:
        """Accounts for new events. Makes room for them in ended streams, otherwise in the largest stream.

        That is a stream of this caller if its share is used up.
        """
        self._account(kept)
        while self._quota.is_over(kept.caller):
            if (victim := self._quota.victim(kept.caller)) is not None:
                self._drop(victim)
                continue
            is_own = self._quota.is_share_used_up(kept.caller)
            candidates = (each for each in self._kept.values() if not is_own or each.caller == kept.caller)
            largest = max(candidates, key=lambda each: each.size)
            has_shrunk = largest.log.drop_older_half()
            self._account(largest)
            if not has_shrunk:
                break
        if kept.log.has_ended:
            kept.stream = kept.log.changed = None
            self._quota.mark(kept, evictable=not kept.readers)

    def _account(self, kept: _Kept) -> None:
        self._quota.grow(kept, STREAM_BYTES + kept.log.size - kept.size)

    async def _evict(self, victim: KeptStream) -> None:
        self._drop(victim)

    def _drop(self, victim: KeptStream) -> None:
        self._forget(self._kept[victim.id])
        self._evicted[victim.id] = None
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def _forget(self, kept: _Kept) -> None:
        kept.log.changed = None  # a cycle, which would keep the events until the next full garbage collection
        del self._kept[kept.id]
        self._quota.remove(kept)
        self._freed += kept.size
        if self._report_freed is not None and self._freed >= FREED_BYTES:
            self._report_freed(self._freed)
            self._freed = 0
