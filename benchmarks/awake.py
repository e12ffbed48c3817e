"""Keeps idle processors awake. A virtual machine halts them, and waking one takes longer than relaying an event."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
"""Runs only while nothing else wants to run on the processor."""


@contextmanager
def processors_awake() -> Iterator[None]:
    """Runs a process on each processor for the duration of the block."""
    command = [sys.executable, "-S", "-c", _SPIN]
    processes = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
