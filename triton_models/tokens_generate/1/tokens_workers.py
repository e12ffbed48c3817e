"""The threads that generate: a fixed number of tasks run at a time, others wait in order."""

import queue
import threading
import time
from collections.abc import Callable


class Workers:
    def __init__(self, count: int) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task``, which must not raise, as soon as a thread is free."""
        self._waiting.put(task)

    def close(self, timeout_s: float) -> None:
        """Ends the threads after the submitted tasks; waits at most ``timeout_s``."""
        for _ in self._threads:
            self._waiting.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _work(self) -> None:
        while task := self._waiting.get():
            task()
