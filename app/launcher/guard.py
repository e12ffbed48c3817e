"""Runs one tritonserver for a gateway, as a separate process: `python -I guard.py ... -- tritonserver ...`.

A killed gateway cannot clean up, but the standard input of the guard is a pipe from the gateway. When the pipe closes
for any reason, the guard ends Triton and all processes that Triton started, and removes their files in /dev/shm. It
does the same when Triton exits, and returns Triton's exit status. This module uses only the standard library.
"""

import argparse
import contextlib
import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Runs Triton until it exits or the gateway is gone. Returns Triton's exit status.

    A parent-death signal on Triton is not enough, because busy stub processes and their shared memory would remain.
    """
    parser = argparse.ArgumentParser(prog="guard")
    parser.add_argument("--shm-prefix", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--grace-s", required=True, type=float)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        status = _run(given.command, dict(pair.split("=", 1) for pair in given.env), given.grace_s)
    finally:
        # This process is the subreaper, so it becomes the parent of every orphan of Triton's processes, in any process
        # group. When it has no children left, all processes of Triton have ended.
        with contextlib.suppress(ChildProcessError):
            while True:
                for child in _children(os.getpid()):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)
        discard(given.shm_prefix, given.folder)
    return status if status >= 0 else 128 - status


def _run(command: list[str], additions: dict[str, str], grace_s: float) -> int:
    """Runs Triton until its end, or until ``grace_s`` after it was told to stop. Returns its status."""
    guard = os.getpid()

    def die_with_guard() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    triton = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**os.environ, **additions},
        process_group=0,
        preexec_fn=die_with_guard,  # noqa: PLW1509 - safe: no thread runs yet
    )
    os.write(1, b"%d\n" % triton.pid)
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: events.put("told to stop"))
    _tell(events, "gateway gone", lambda: os.read(0, 1))
    _tell(events, "triton ended", lambda: os.waitid(os.P_PID, triton.pid, os.WEXITED | os.WNOWAIT))
    if events.get() != "triton ended":
        os.kill(triton.pid, signal.SIGTERM)
        with contextlib.suppress(queue.Empty):
            while events.get(timeout=grace_s) != "triton ended":
                continue
    end_group(triton.pid)
    return triton.wait()


def _tell(events: "queue.SimpleQueue[str]", event: str, wait: Callable[[], object]) -> None:
    def tell() -> None:
        with contextlib.suppress(ChildProcessError):  # already reaped as an orphan
            wait()
        events.put(event)

    threading.Thread(target=tell, daemon=True).start()


def end_group(group: int) -> None:
    """Kills every process of Triton's process group. The gateway calls this too, for example after a killed guard."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def discard(shm_prefix: str, folder: Path) -> None:
    """Removes shared memory whose names begin with `shm_prefix`, and the temporary folder.

    The gateway calls this too, to clean up after a killed guard.
    """
    for region in SHARED_MEMORY.glob(shm_prefix + "*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _children(parent: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                yield int(stat.parent.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
