"""Waits for a condition instead of a fixed time, and runs an event loop or repeated calls during the test.

Only a test that fails waits until the end.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

PATIENCE_S = 60.0
"""How long a test waits for what takes a moment on an idle machine, so that a busy machine makes it slow, not red."""


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    ends, pause_s = time.monotonic() + within_s, 0.01
    while not condition():
        assert time.monotonic() < ends, f"the condition is still false after {within_s} s"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def repeated(*calls: Callable[[], object], pause_s: float = 0.0) -> Iterator[None]:
    """Repeats each call in a thread for the duration of the block. Then it raises the exception of a call."""
    is_over = threading.Event()

    def repeat(call: Callable[[], object]) -> None:
        while not is_over.wait(pause_s):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(repeat, call) for call in calls]
        try:
            yield
        finally:
            is_over.set()
    for each in running:
        each.result()


async def until(condition: Callable[[], object]) -> None:
    """Like :func:`eventually`, while the event loop goes on."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
