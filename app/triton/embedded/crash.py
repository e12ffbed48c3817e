"""Finds out whether the crash handler of a process runs."""

import signal
from contextlib import suppress
from pathlib import Path

_CRASHES = (1 << signal.SIGABRT - 1) | (1 << signal.SIGSEGV - 1)
_ORDERLY = 1 << signal.SIGTERM - 1


def is_crashing(pid: int) -> bool:
    """Whether a thread of the process runs a handler of SIGABRT or SIGSEGV.

    The kernel blocks a signal in the thread that handles it. A thread that blocks SIGTERM too blocks signals for
    another reason. Source: signal(7), sigaction(2), proc_pid_status(5).
    """
    return any(mask & _CRASHES and not mask & _ORDERLY for mask in _blocked(pid))


def _blocked(pid: int) -> list[int]:
    masks = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread ended
            lines = status.read_text().splitlines()
            masks += [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
    return masks
