"""Writes the events of one stream of this process to Redis."""

import asyncio
import time
from collections import deque
from contextlib import suppress

from redis.exceptions import RedisError

from app.streams.event import Event
from app.streams.log import EVENT_BYTES, MAX_REPLAY_BYTES, STALL_S
from app.streams.quota import KeptStream
from app.streams.redis_connections import OUTAGE_S, RETRY_PAUSE_S, RedisClient
from app.streams.redis_kept import KeptInRedis
from app.streams.redis_keys import PUBLISH, keys_of, lifetime_ms, script_words
from app.streams.stream import Stream

MAX_BATCH_BYTES = 256 * 1024


class StreamLost(Exception):
    """The stream in Redis cannot be written any more."""


class Publisher:
    """``read_at``: time of the last known reader, on the monotonic clock."""

    def __init__(
        self,
        stream: Stream,
        room: KeptInRedis,
        kept: KeptStream,
        resume_s: float,
    ) -> None:
        self.stream = stream
        self.start_key = ""
        """The key in Redis of the stream's idempotency key; empty without one."""
        self.kept = kept
        self.keys = keys_of(kept.id)
        self._room = room
        self.resume_s = resume_s
        self.read_at = time.monotonic()
        self._sizes: deque[tuple[int, int]] = deque()
        """Id and size of each event in Redis."""
        self._total = 0

    async def publish(self, redis: RedisClient) -> None:
        """Publishes the events up to the terminal event. Raises StreamLost."""
        after = 0
        while True:
            events = await self.stream.log.read(after)
            for batch in batches_of(events):
                await self._write(redis, batch)
            after = events[-1].id
            if events[-1].is_terminal:
                return

    async def _write(self, redis: RedisClient, batch: list[Event]) -> None:
        """Retries while Redis is unavailable, but only briefly if the model waits, because Triton buffers responses.

        Raises StreamLost.
        """
        await self._account_for(batch)
        words = (lifetime_ms(self.resume_s), self._sizes[0][0], *script_words(batch))
        started = time.monotonic()
        ends, ends_if_full = started + OUTAGE_S, started + STALL_S
        while True:
            try:
                is_written = await redis.eval(PUBLISH, 2, self.keys.events, self.keys.stream, *words)
                break
            except (RedisError, OSError) as exc:
                if time.monotonic() > (ends_if_full if self.stream.log.is_full else ends):
                    raise StreamLost from exc
                await asyncio.sleep(RETRY_PAUSE_S)
        if not is_written:
            raise StreamLost

    async def _account_for(self, events: list[Event]) -> None:
        """Notes new events, and drops the oldest ones that do not fit into the stream's or the process's limit."""
        before = self._total
        self._sizes.extend((event.id, event.size + EVENT_BYTES) for event in events)
        self._total += sum(event.size + EVENT_BYTES for event in events)
        least = 1 + events[-1].is_terminal
        while self._total > MAX_REPLAY_BYTES and len(self._sizes) > least:
            self._drop_oldest()
        with suppress(RedisError, OSError):
            while not await self._room.grow(self.kept, self._total - before) and len(self._sizes) > 1:
                before = self._total
                for _ in range(len(self._sizes) // 2):
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._total -= self._sizes.popleft()[1]


def batches_of(events: list[Event]) -> list[list[Event]]:
    """Yields batches of at most MAX_BATCH_BYTES, or of one larger event."""
    batches: list[list[Event]] = []
    room = 0
    for event in events:
        if not batches or event.size > room:
            batches.append([])
            room = MAX_BATCH_BYTES
        batches[-1].append(event)
        room -= event.size
    return batches
