"""Runs one Triton below its guard process, and reads its log.

`GuardedTriton` has the process and `TritonLog` its log. A Triton that announces a crash in its log may hang in its
crash handler (`is_crashing`); then it is killed.
"""

import asyncio
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from contextlib import suppress
from pathlib import Path

from app.launcher import guard
from app.launcher.launch import Launch
from app.launcher.machine import EmbeddedTritonError

_CRASHES = (1 << signal.SIGABRT - 1) | (1 << signal.SIGSEGV - 1)
_ORDERLY = 1 << signal.SIGTERM - 1


def is_crashing(pid: int) -> bool:
    """Whether a thread of the process runs a handler of SIGABRT or SIGSEGV.

    The kernel blocks a signal in the thread that handles it. A thread that blocks SIGTERM too blocks signals for
    another reason. Source: signal(7), sigaction(2), proc_pid_status(5).
    """
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread ended
            (blocked,) = re.findall(r"^SigBlk:\s*(\w+)", status.read_text(), re.MULTILINE)
            if (mask := int(blocked, 16)) & _CRASHES and not mask & _ORDERLY:
                return True
    return False


logger = logging.getLogger(__name__)

_GUARD = str(Path(guard.__file__).resolve())
_LEVELS = {"I": logging.DEBUG, "W": logging.DEBUG, "E": logging.ERROR, "F": logging.CRITICAL}
_PREFIX = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (\S+)\] ?(.*)", re.DOTALL)
_LOADED = re.compile(r"\"successfully loaded '([^']+)'")
_NOT_LOADED = re.compile(r"\"failed to load '([^']+)' version \d+: (.*)\"\Z", re.DOTALL)
_NOT_POLLED = re.compile(r"\"?Poll failed for model directory '([^']+)': (.*?)\"?\Z", re.DOTALL)
# Logged at every start without a GPU, where they are harmless.
_HARMLESS = re.compile(r"CUDA|CudaDriverHelper|NVML|DCGM")
# Lines that models write for GATEWAY_LOG_TENSORS (model_kit.tensor_log). They are shown although other lines are not.
_TENSORS = re.compile(r'"?tensors triton_request_id=')
# Rows of the tables that Triton logs at its start. All other messages of Triton have one line each.
_TABLE_ROW = re.compile(r"[+|]")
# Written when Triton is asked to stop.
_STOPPING = re.compile(r"Signal \((?:2|15)\) received\.")
# Written by Triton's handler of SIGABRT and SIGSEGV, and by glibc and libstdc++ before an abort. A model's process may
# write the same words. Sources: triton_signal.cc of Triton's server, malloc.c, assert.c and debug/ of glibc.
_DEATH = re.compile(
    r"Signal \((?:6|11)\) received\."
    r"|(?:malloc|calloc|realloc|free|munmap_chunk|mremap_chunk|malloc_consolidate|tcache_thread_shutdown)\(\): "
    r"|double free or corruption|corrupted (?:size|double-linked)"
    r"|\*\*\* .* detected \*\*\*|Fatal glibc error: |.*: Assertion `.*' failed\."
    r"|terminate called |pure virtual method called"
)
_LINES_KEPT = 400
_LONGEST_LINE = 16 * 1024


class TritonLog:
    """Forwards Triton's log to Python's logging, and keeps the latest lines to explain a failure."""

    def __init__(self) -> None:
        self.death = ""
        """The first line that announces that Triton, or the process of a model, is crashing; empty if there is none."""
        self.loaded: list[str] = []
        self.failures: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._rest = b""
        self._level = logging.DEBUG

    def feed(self, data: bytes) -> None:
        """Adds the next bytes, which may end inside a line. A line that is too long is split."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line[:_LONGEST_LINE].decode("utf-8", "replace").rstrip())

    def explanation(self) -> str:
        """Returns why Triton exited, according to its log: the models that failed, otherwise its last errors."""
        if self.failures:
            return "\n".join(f"model {name!r}: {reason}" for name, reason in sorted(self.failures.items()))
        begins = ("E", "F", "error:", "Failed")
        errors = [line for line in self._lines if line.startswith(begins) and not _HARMLESS.search(line)]
        return "\n".join(errors or [*self._lines][-8:]) or "it wrote no log"

    def _take(self, line: str) -> None:
        self._lines.append(line)
        if match := _PREFIX.match(line):
            message = match[3]
            self._level = logging.INFO if _TENSORS.match(message) else _LEVELS[match[1]]
            if found := _LOADED.match(message):
                self.loaded.append(found[1])
            elif found := _NOT_LOADED.match(message) or _NOT_POLLED.match(message):
                self.failures[found[1].rpartition("/")[2]] = found[2].replace("\\n", "\n").strip()
        elif _DEATH.match(line):  # as the other lines without a prefix, not by Triton's logger
            self.death = self.death or line
            self._level = logging.ERROR
        elif line and not _TABLE_ROW.match(line):
            self._level = logging.DEBUG if _STOPPING.match(line) else logging.WARNING
        if line and not _HARMLESS.search(line):
            logger.log(self._level, "triton: %s", line)


CRASH_S = 5.0
"""How long Triton may take to end after it has announced a crash. Its crash handler may deadlock, because it allocates
memory and starts processes."""


class GuardedTriton:
    """Created by `start`; runs until `ended` returns."""

    def __init__(self, launch: Launch, process: Process, pid: int, log: asyncio.StreamReader) -> None:
        self.launch = launch
        self.pid = pid
        self.log = TritonLog()
        self._process = process
        self._dying: asyncio.Task[None] | None = None
        self._ended = asyncio.ensure_future(self._run(log))

    @classmethod
    async def start(cls, launch: Launch) -> "GuardedTriton":
        """Starts the guard in its own process group, so that Ctrl-C in the terminal reaches only the gateway."""
        log, log_end = os.pipe()
        command = [
            *(sys.executable, "-I", "-S", _GUARD),
            f"--shm-prefix={launch.shm_prefix}",
            f"--folder={launch.folder}",
            f"--grace-s={launch.grace_s}",
            *(f"--env={name}={value}" for name, value in launch.environment().items()),
            "--",
            *launch.command(),
        ]
        environment = dict(launch.options.environment)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=log_end, env=environment, start_new_session=True
            )
        finally:
            os.close(log_end)
        assert process.stdout is not None
        if not (pid := await process.stdout.readline()):
            raise EmbeddedTritonError("The process that guards Triton ended before it had started Triton.")
        # With a pipe of asyncio, `Process.wait` may wait for every process that holds the pipe, also orphaned stubs.
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(log, "rb", 0))
        return cls(launch, process, int(pid), reader)

    @property
    def has_ended(self) -> bool:
        """Whether Triton, its processes and its files are gone."""
        return self._ended.done()

    async def ended(self) -> int:
        """Waits until Triton, its guard and their files are gone. Returns Triton's exit status (128 + signal)."""
        return await asyncio.shield(self._ended)

    @property
    def status(self) -> int:
        """Triton's exit status (128 + signal). Only after its end."""
        return self._ended.result()

    async def stop(self) -> int:
        """Closes the guard's pipe, so that the guard ends Triton, and waits."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self.ended()

    async def kill(self) -> int:
        """Kills an unresponsive Triton without its exit timeout, and waits."""
        guard.end_group(self.pid)
        return await self.ended()

    async def _run(self, log: asyncio.StreamReader) -> int:
        relay = asyncio.ensure_future(self._relay(log))
        status = await self._process.wait()
        if status < 0:
            # The guard was killed, and the kernel killed Triton too. Its stubs and shared memory remain.
            guard.end_group(self.pid)
            guard.discard(self.launch.shm_prefix, self.launch.folder)
        await relay
        if self._dying is not None:
            self._dying.cancel()
        return status if status >= 0 else 128 - status

    async def _relay(self, log: asyncio.StreamReader) -> None:
        while data := await log.read(65536):
            self.log.feed(data)
            if self.log.death and (self._dying is None or self._dying.done()):
                self._dying = asyncio.create_task(self._kill_if_crashing())

    async def _kill_if_crashing(self) -> None:
        """Kills a Triton whose crash handler hangs. A model may write the same words: then nothing happens."""
        death = self.log.death
        await asyncio.sleep(CRASH_S)
        if is_crashing(self.pid):
            logger.error("the embedded Triton crashed (%s) and has not ended after %g s: it is killed", death, CRASH_S)
            guard.end_group(self.pid)
        else:
            self.log.death = ""
