"""One running Triton and its guard process."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from app.triton.embedded import guard
from app.triton.embedded.crash import is_crashing
from app.triton.embedded.errors import StartFailed
from app.triton.embedded.launch import Launch
from app.triton.embedded.log import TritonLog

CRASH_S = 5.0
"""How long Triton may take to end after it has announced a crash. Its crash handler may deadlock, because it allocates
memory and starts processes."""
_logger = logging.getLogger(__name__)


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
        """Starts the guard in its own session, so that Ctrl-C in the terminal reaches only the gateway."""
        log, log_end = os.pipe()
        environment = dict(launch.options.environment)
        try:
            process = await asyncio.create_subprocess_exec(
                *_guard_command(launch),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_end,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(log_end)
        return cls(launch, process, await _pid_from(process), await _reader(log))

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
            self._stand_in_for_guard()
        await relay
        if self._dying is not None:
            self._dying.cancel()
        return status if status >= 0 else 128 - status

    def _stand_in_for_guard(self) -> None:
        # The guard was killed, and the kernel killed Triton too. Its stubs and shared memory remain.
        guard.end_group(self.pid)
        guard.discard(self.launch.shm_prefix, self.launch.folder)

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
            _logger.error("the embedded Triton crashed (%s) and has not ended after %g s: it is killed", death, CRASH_S)
            guard.end_group(self.pid)
        else:
            self.log.death = ""


async def _pid_from(process: Process) -> int:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise StartFailed("The process that guards Triton ended before it had started Triton.")
    return int(line)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    # With a pipe of asyncio, `Process.wait` may wait for every process that holds the pipe, including orphaned stubs.
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0))
    return reader


def _guard_command(launch: Launch) -> list[str]:
    additions = (f"--env={name}={value}" for name, value in launch.environment().items())
    return [
        *(sys.executable, "-I", "-S", str(Path(guard.__file__).resolve())),
        f"--shm-prefix={launch.shm_prefix}",
        f"--folder={launch.folder}",
        f"--grace-s={launch.grace_s}",
        *additions,
        "--",
        *launch.command(),
    ]
