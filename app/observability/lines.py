"""Writes lines to a descriptor in a separate thread, so that a slow reader of the log never blocks a request."""

import atexit
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Limit of waiting lines, in bytes. Further lines are dropped and counted."""
PAUSE_S = 0.02
"""The pause between two writes, so that a busy gateway writes many lines at once."""
CLOSE_S = 1.0
"""Time limit for writing the last lines at the end of the process."""


Turn = Callable[[], AbstractContextManager[bool | None]]
"""A block in which no other process writes to the same descriptor.

Its value is true if the previous process was killed in its turn: the last line may then be incomplete.
"""
_WRITING, _DONE = b"w", b"d"


def turns_by(lock: int) -> Turn:
    """``lock``: a descriptor of a file in memory that the processes share; its byte says whether one of them writes.

    The kernel ends the turn of a process that dies.

    Without turns, the kernel may mix the writes of two processes to one pipe if they are larger than 4 KiB.
    """

    @contextmanager
    def turn() -> Iterator[bool]:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        try:
            was_cut_off = os.pread(lock, 1, 0) == _WRITING
            os.pwrite(lock, _WRITING, 0)
            yield was_cut_off
            os.pwrite(lock, _DONE, 0)
        finally:
            fcntl.lockf(lock, fcntl.LOCK_UN)

    return turn


class LineWriter:
    """:meth:`write` may be called from any thread and never blocks."""

    def __init__(self, descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES, turn: Turn = nullcontext) -> None:
        self.dropped = 0
        """The number of dropped lines."""
        self._turn = turn
        self._descriptor = descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._writing_bytes = 0
        self._has_lines = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """``line`` ends with a newline."""
        with self._lock:
            waiting_bytes = len(self._waiting)
            if waiting_bytes + self._writing_bytes + len(line) > self._max_waiting_bytes:
                self.dropped += 1
                return
            self._waiting += line
            if not waiting_bytes:
                self._wake()

    def flush(self, within_s: float = CLOSE_S) -> None:
        """Waits until every line is written, or until the timeout."""
        self._is_idle.wait(within_s)

    def _wake(self) -> None:
        """Wakes the thread, only once until it takes the lines."""
        self._is_idle.clear()
        self._has_lines.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()
            atexit.register(self.flush)

    def _run(self) -> None:
        while True:
            self._has_lines.wait()
            self._has_lines.clear()
            with self._lock:
                lines, self._waiting = self._waiting, bytearray()
                self._writing_bytes = len(lines)
            self._write_all(lines)
            with self._lock:
                self._writing_bytes = 0
                if not self._waiting:
                    self._is_idle.set()
            time.sleep(PAUSE_S)

    def _write_all(self, lines: bytearray) -> None:
        """Blocks as long as the reader of the descriptor does. Lines for a closed descriptor are dropped."""
        rest = memoryview(lines)
        try:
            with self._turn() as was_cut_off:
                if was_cut_off:
                    os.write(self._descriptor, b"\n")
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with self._lock:
                self.dropped += bytes(rest).count(b"\n")
