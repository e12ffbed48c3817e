"""The idempotency keys of the streams in :class:`app.streams.memory_store.MemoryStore`."""

import asyncio
from dataclasses import dataclass

from app.streams.start import LONGEST_START_S, StartedStream, StartKey, key_reused, start_in_progress


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
        """As :meth:`app.streams.store.StreamStore.claim`."""
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
        """As :meth:`app.streams.store.StreamStore.release`."""
        if self._starts[start.caller, start.key].started is None:
            self.forget(start)

    def forget(self, start: StartKey) -> None:
        """Called when the stream is not kept any more."""
        self._starts.pop((start.caller, start.key)).changed.set()
