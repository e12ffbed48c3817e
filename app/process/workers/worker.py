"""Runs a worker process, which serves the API and reports to its supervisor.

``work`` opens the worker, and ``Link`` exchanges its messages with the supervisor. The worker asks the supervisor for
explained requests and for the statistics of all workers.
"""

import asyncio
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

from app import __version__
from app.api import body_memory
from app.core.errors import Internal
from app.http1.protocol import ConnectionLimit
from app.main import Gateway
from app.observability.explain.request import ExplainedRequest, Found
from app.observability.log import configure_logging, dropped_lines, turns_by
from app.observability.metrics import DROPPED_LINES, cpu_series
from app.observability.statistics import Statistics
from app.observability.tracing import open_tracer
from app.observability.worker_metrics import Series, Writer
from app.process.gateway import Stores, open_gateway
from app.process.listening import Server, serving
from app.process.open_files import connections_within
from app.process.serving import api_of, freeze_heap, open_store
from app.process.shutdown import Shutdown, delay, drain
from app.process.supervision import Supervisor
from app.process.workers.channel import (
    Channel,
    ExplanationFound,
    ExplanationWanted,
    Report,
    StatisticsWanted,
    Totals,
    WorkerConfig,
    WorkerUpdate,
)

ANSWER_S = 5.0


class SupervisorsExplanations:
    """Sends explained requests of this worker to the supervisor, and asks the supervisor for explanations.

    The supervisor keeps those of all workers, and receives Triton's spans. Implements
    :class:`app.observability.explain.request.Explanations`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Found | None]] = {}

    def put(self, request: ExplainedRequest) -> None:
        """Never waits."""
        self._channel.send(request)

    async def find(self, owner: str, request_id: str) -> Found | None:
        """Asks the supervisor. Raises Internal if it does not answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._channel.send(ExplanationWanted(number, owner, request_id))
        try:
            async with asyncio.timeout(ANSWER_S):
                found: Found | None = await answer
        except TimeoutError as exc:
            raise Internal("The supervisor of this gateway's workers does not answer.") from exc
        finally:
            del self._waiting[number]
        return found

    def arrived(self, answer: ExplanationFound) -> None:
        """No-op if nobody waits for the answer any more."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.found)


class TotalsOfWorkers:
    """Asks the supervisor for the statistics of all workers.

    At most one question is on its way; callers that ask meanwhile get the same answer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answer: asyncio.Future[Statistics] | None = None

    async def statistics(self) -> Statistics:
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._channel.send(StatisticsWanted())
        return await asyncio.shield(self._answer)

    def arrived(self, totals: Totals) -> None:
        if self._answer is not None:
            self._answer.set_result(totals.statistics)
            self._answer = None


Answers = Mapping[type, Callable[[Any], None]]
"""Type of a message of the supervisor -> its receiver."""

REPORT_S = 0.25
_PR_SET_PDEATHSIG = 1


async def work(descriptor: int) -> None:
    """Serves until SIGTERM. ``descriptor``: this process's end of the channel.

    Raises the errors of :func:`app.process.serving.serve`, and EOFError if the supervisor ends before the start.
    """
    channel = await Channel.open(socket.socket(fileno=descriptor))
    config: WorkerConfig = await channel.receive()
    _end_with(config.supervisor)
    settings, number = config.settings, config.number
    configure_logging(settings.log_level, settings.log_format, number, turns_by(config.log_lock))
    values = Writer(config.metrics)
    values.use()
    own_numbers = OwnNumbers(values)
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    supervisor = Supervisor(on_failure=shutdown.request)
    async with AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(open_tracer(settings.traces_url, __version__))
        store = None
        if settings.redis_url is not None:
            store = await stack.enter_async_context(open_store(settings))
            await stack.enter_async_context(supervisor.running("store of streams", store.run()))
        explanations = SupervisorsExplanations(channel)
        stores = Stores(store, explanations if settings.may_explain else None)
        gateway = await stack.enter_async_context(open_gateway(settings, config.triton, stores, tracer, supervisor))
        totals = TotalsOfWorkers(channel)
        gateway.statistics_of_workers = totals.statistics
        app = api_of(gateway, settings, config.admin_port)
        connections = connections_within(settings.max_connections, is_quiet=True)
        limit = ConnectionLimit(connections, gateway.inference.metrics.count_refused_connection)
        body_memory.keep()
        freeze_heap()
        own = _listener(config.listeners[number - 1])
        server = await stack.enter_async_context(serving(app, own, supervisor, limit))
        answers: Answers = {Totals: totals.arrived, ExplanationFound: explanations.arrived}
        link = Link(channel, gateway, ListenerSet(server, number, config.listeners), own_numbers, answers)
        await stack.enter_async_context(supervisor.running("link to the supervisor", link.run()))
        await shutdown.requested.wait()
        await delay(gateway.inference.workload, server, shutdown, settings.shutdown_delay_s)
        await drain(gateway.inference.workload, shutdown, settings.drain_s)
    own_numbers.share()
    supervisor.raise_if_failed()


def _end_with(supervisor: int) -> None:
    """Asks the kernel to kill this process when the supervisor ends, because nothing else would stop it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        raise EOFError


def _listener(descriptor: int) -> socket.socket:
    """Returns a copy, because the server closes it when it stops, while the descriptor must stay open."""
    return socket.socket(fileno=os.dup(descriptor))


class OwnNumbers:
    """Counters that the process or the log keeps: copied to the shared values, so that they survive this process."""

    def __init__(self, values: Writer) -> None:
        self._dropped_lines = values.value(Series("counter", DROPPED_LINES, f"{DROPPED_LINES}_total", (), ()))
        self._cpu_s = values.value(cpu_series())

    def share(self) -> None:
        self._dropped_lines.set(dropped_lines())
        self._cpu_s.set(time.process_time())


class ListenerSet:
    """The sockets from which this worker accepts connections: its own, and temporarily those of other workers."""

    def __init__(self, server: Server, number: int, listeners: list[int]) -> None:
        self._server = server
        self._number = number
        self._listeners = listeners
        self._open: dict[int, asyncio.AbstractServer] = {}

    async def listen_on(self, numbers: Iterable[int]) -> None:
        wanted = set(numbers) - {self._number}
        for number in self._open.keys() - wanted:
            self._open.pop(number).close()
        for number in wanted - self._open.keys():
            self._open[number] = await self._server.accept_from(_listener(self._listeners[number - 1]))


class Link:
    """Reports this worker's state to the supervisor, and follows its update. ``answers``: who asked for each."""

    def __init__(
        self, channel: Channel, gateway: Gateway, listeners: ListenerSet, own_numbers: OwnNumbers, answers: Answers
    ) -> None:
        self._channel = channel
        self._gateway = gateway
        self._catalog = gateway.inference.catalog
        self._health = gateway.health
        self._listeners = listeners
        self._own_numbers = own_numbers
        self._answers = answers

    async def run(self) -> None:
        """Runs until it is cancelled. Raises EOFError if the supervisor has ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            tasks.create_task(self._follow())

    async def _report(self) -> None:
        while True:
            self._own_numbers.share()
            self._gateway.show_load()
            self._channel.send(Report(self._catalog.is_ready, self._health.take()))
            await asyncio.sleep(REPORT_S)

    async def _follow(self) -> None:
        while True:
            message = await self._channel.receive()
            if not isinstance(message, WorkerUpdate):
                self._answers[type(message)](message)
                continue
            self._health.follow(message.faults)
            await self._listeners.listen_on(message.listens_on)
