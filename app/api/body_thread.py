"""Reads large bodies in a thread, where the callers take turns."""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from app.admission.keys import Caller
from app.admission.queue import FairQueue
from app.core.errors import DeadlineExceeded
from app.core.inference import Deadline

SWITCH_S = 0.0005
"""How long the event loop waits for the interpreter's lock while a body is read. An event of a stream needs the lock
several times, and Python's default is 5 ms."""
Read = TypeVar("Read")


class _Turn:
    """One body. Implements QueueEntry: a caller's long reads have a line of their own, so short ones pass them."""

    __slots__ = ("key", "priority", "read", "result")

    def __init__(self, read: Callable[[], Any], caller: Caller, *, is_long: bool) -> None:
        self.read = read
        self.key = f"{caller.id}\0{is_long}"
        self.priority = caller.priority
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class BodyThread:
    """Reads one body after the other: docs/decisions/0005-bodies-and-json.md says why one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies", initializer=sys.setswitchinterval, initargs=(SWITCH_S,))
        self._queue = FairQueue[_Turn]()
        self._running: Future[Any] | None = None

    async def read(self, read: Callable[[], Read], caller: Caller, deadline: Deadline | None, *, is_long: bool) -> Read:
        """Returns ``read()``. If the wait is cancelled, what has not begun is not read.

        Raises the errors of ``read``, and DeadlineExceeded.
        """
        turn = _Turn(read, caller, is_long=is_long)
        self._queue.add(turn)
        self._take_turn()
        try:
            async with asyncio.timeout(None if deadline is None else deadline.remaining_s()):
                result: Read = await turn.result
                return result
        except TimeoutError as exc:
            raise DeadlineExceeded("The deadline passed before the body was read.") from exc
        finally:
            self._queue.remove(turn)

    def _take_turn(self) -> None:
        if self._running is None or self._running.done():
            turn = self._queue.take(lambda _: True)
            if turn is not None:
                self._running, loop = self._thread.submit(turn.read), turn.result.get_loop()
                self._running.add_done_callback(lambda done: loop.call_soon_threadsafe(self._ended, turn, done))

    def _ended(self, turn: _Turn, done: "Future[Any]") -> None:
        if self._running is done:
            self._running = None  # keeps no result
        self._take_turn()
        if turn.result.done():
            return  # nobody waits any more
        error = done.exception()
        if error is None:
            turn.result.set_result(done.result())
        else:
            turn.result.set_exception(error)
