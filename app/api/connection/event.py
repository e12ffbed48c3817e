"""An event that uses memory only if something waits for it."""

import asyncio
from typing import Literal


class LazyEvent:
    """Creates its ``asyncio.Event`` for the first waiter, because most connections never have one."""

    __slots__ = ("_event", "_is_set")

    def __init__(self, *, is_set: bool) -> None:
        self._is_set = is_set
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> Literal[True]:
        if not self._is_set:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()
        return True
