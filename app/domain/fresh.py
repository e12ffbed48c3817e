"""An answer that is asked for again only after a while, so that many callers cost as much as one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Fresh(Generic[Answer]):
    """``fresh_s``: how long an answer is returned without asking again. Callers that wait get the same answer."""

    def __init__(self, ask: Callable[[], Awaitable[Answer]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._known: tuple[float, Answer] | None = None

    async def current(self) -> Answer:
        """Raises what ``ask`` raises; the next call then asks again."""
        async with self._lock:
            if self._known is None or time.monotonic() >= self._known[0]:
                answer = await self._ask()
                self._known = time.monotonic() + self._fresh_s, answer
            return self._known[1]
