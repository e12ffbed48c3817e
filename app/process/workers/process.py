"""One worker process, as the supervisor sees it."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from app.observability.shared_values import Reader, Series
from app.process.workers.channel import Channel, Guidance, Order, Report

COMMAND = (sys.executable, "-m", "app.cli", "worker")


class WorkerProcess:
    """Created by :meth:`start`."""

    def __init__(self, process: Process, channel: Channel, numbers: Reader) -> None:
        self.state = "starting"
        """Changes to ``ready`` or ``not_ready`` when the worker accepts connections."""
        self.silence_s = 0.0
        """Seconds since the last report, without times in which the supervisor itself did not run."""
        self._process = process
        self._channel = channel
        self._numbers = numbers
        self._guidance: Guidance | None = None

    @classmethod
    async def start(cls, order: Order) -> "WorkerProcess":
        """Starts a worker in a separate session, so that Ctrl-C reaches only the supervisor. Raises OSError."""
        numbers = Reader(order.metrics)
        ours, theirs = socket.socketpair()
        try:
            inherited = (theirs.fileno(), order.metrics.values, order.metrics.names, order.log_lock, *order.listeners)
            process = await asyncio.create_subprocess_exec(
                *COMMAND, str(theirs.fileno()), stdin=DEVNULL, pass_fds=inherited, start_new_session=True
            )
        except BaseException:
            ours.close()
            numbers.close()
            raise
        finally:
            theirs.close()
        channel = await Channel.open(ours)
        channel.send(order)
        return cls(process, channel, numbers)

    @property
    def serves(self) -> bool:
        """Whether it accepts connections."""
        return self.state != "starting"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, on_report: Callable[[Report], None], answer: Callable[[Any], Awaitable[object]]) -> int:
        """Handles the messages until the process ends. Returns its status, -n after signal n.

        ``answer``: takes every other message. The result is sent to the worker if it is not None.
        """
        with suppress(EOFError):
            while True:
                message = await self._channel.receive()
                if not isinstance(message, Report):
                    if (reply := await answer(message)) is not None:
                        self._channel.send(reply)
                    continue
                self.silence_s = 0.0
                self.state = "ready" if message.is_ready else "not_ready"
                on_report(message)
        return await self._process.wait()

    def guide(self, guidance: Guidance) -> None:
        if guidance != self._guidance:
            self._guidance = guidance
            self._channel.send(guidance)

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def numbers(self) -> dict[Series, float]:
        """The values of its metrics."""
        return self._numbers.read()

    def close(self) -> None:
        """Frees the supervisor's resources for a process that has ended."""
        self._channel.close()
        self._numbers.close()
