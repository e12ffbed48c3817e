"""Manages all workers of a supervisor: starts, guides, replaces and drains them."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from app.domain.backoff import Backoff
from app.main import Gateway
from app.observability.explain.request import ExplainedRequest
from app.observability.shared_values import Descriptors
from app.observability.statistics import statistics_of
from app.observability.summed import SummedMetrics
from app.process.listening import GRACE_S
from app.process.shutdown import LAST_BYTES_S, Shutdown
from app.process.workers.channel import (
    Explanation,
    ExplanationWanted,
    Guidance,
    Order,
    Report,
    StatisticsWanted,
    Totals,
)
from app.process.workers.process import WorkerProcess

TICK_S = 0.25
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STABLE_S = 60.0
"""A worker that ran at least this long is replaced without a delay."""
MAX_STARTS = 5
"""If every worker ended this often before it served, the supervisor stops."""
SILENCE_S = 30.0
"""A worker without a report for this time counts as stuck and is killed."""
START_S = 120.0
"""Time limit for the first report."""
END_S = LAST_BYTES_S + GRACE_S + 5.0
"""Time limit for a worker to end after its drain."""

OrderOf = Callable[[int, Descriptors], Order]
"""Creates the order for the worker with this number."""

_log = logging.getLogger(__name__)


class WorkersCannotStart(Exception):
    """Every worker ended several times in a row before it served. The workers' log lines have the cause."""


class Crew:
    """Implements :class:`app.main.Workers`. ``gateway``: the supervisor's gateway, which monitors Triton."""

    def __init__(self, workers: int, order_of: OrderOf, gateway: Gateway) -> None:
        self.registry = CollectorRegistry()
        self._order_of = order_of
        self._metrics = gateway.inference.metrics
        self._health = gateway.health
        self._explanations = gateway.explain_store
        self._running: dict[int, WorkerProcess] = {}
        self._failed_starts = dict.fromkeys(range(1, workers + 1), 0)
        """For each worker's number, how often in a row it ended before it served."""
        self._was_complete = False
        self._is_ending = False
        self._summed = SummedMetrics(self._metrics.registry, lambda: [each.numbers() for each in self._workers])
        self.registry.register(self._summed)
        self._metrics.processes.workers = lambda: [each.pid for each in self._workers]

    @property
    def states(self) -> Mapping[str, str]:
        running = self._running
        return {str(number): running[number].state if number in running else "starting" for number in self._numbers}

    @property
    def is_ready(self) -> bool:
        """At start, requires every worker to be ready. Later, workers that are being replaced do not count."""
        states = set(self.states.values())
        return self._was_complete and "ready" in states and "not_ready" not in states

    async def run(self) -> None:
        """Runs until it is cancelled. Raises WorkersCannotStart."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in self._numbers:
                    tasks.create_task(self._keep(number))
                tasks.create_task(self._watch())
        finally:
            self._signal(signal.SIGKILL)
            self._running.clear()

    async def drain(self, shutdown: Shutdown, drain_s: float) -> None:
        """Drains every worker, and kills workers that do not end in time."""
        self._is_ending = True
        self._signal(signal.SIGTERM)
        ends = time.monotonic() + drain_s + END_S
        is_hurried = False
        while self._running and time.monotonic() < ends:
            if shutdown.hurried.is_set() and not is_hurried:
                is_hurried, ends = True, time.monotonic() + END_S
                self._signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
        if self._running:
            _log.error("workers did not end in time and are killed")

    async def _keep(self, number: int) -> None:
        """Starts the worker again whenever it ends."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while not self._is_ending:
            since = time.monotonic()
            await self._live(number)
            if time.monotonic() - since > STABLE_S:
                backoff.reset()
            elif not self._is_ending:
                await asyncio.sleep(backoff.fail())

    async def _live(self, number: int) -> None:
        """Runs one worker process until it ends. Raises WorkersCannotStart."""
        try:
            worker = await WorkerProcess.start(self._order_of(number, Descriptors.create()))
        except OSError as exc:
            _log.error("worker %d cannot be started: %s", number, exc.strerror)
            self._count_start(number, has_failed=True)
            return
        self._running[number] = worker
        if self._is_ending:
            worker.send_signal(signal.SIGTERM)
        status = await worker.run(self._heard, self._answer_to)
        del self._running[number]
        self._summed.keep(worker.numbers())
        worker.close()
        self._guide()
        if not self._is_ending:
            self._count_death(number, worker, status)

    def _count_death(self, number: int, worker: WorkerProcess, status: int) -> None:
        self._metrics.worker_deaths.inc()
        _log.error("worker %d ended with status %d and is replaced", number, status, extra={"pid": worker.pid})
        self._count_start(number, has_failed=not worker.serves)

    def _count_start(self, number: int, *, has_failed: bool) -> None:
        self._failed_starts[number] = self._failed_starts[number] + 1 if has_failed else 0
        if min(self._failed_starts.values()) >= MAX_STARTS:
            raise WorkersCannotStart

    def _heard(self, report: Report) -> None:
        self._health.add(report.observed)
        self._was_complete |= set(self.states.values()) == {"ready"}
        self._guide()

    async def _answer_to(self, message: StatisticsWanted | ExplainedRequest | ExplanationWanted) -> object:
        """Answers a worker's question; None if the message is no question."""
        if isinstance(message, StatisticsWanted):
            return Totals(statistics_of(self.registry))
        if self._explanations is None:
            return None
        if isinstance(message, ExplainedRequest):
            self._explanations.put(message)
            return None
        return Explanation(message.number, await self._explanations.find(message.owner, message.request_id))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._guide()
            for number, worker in self._running.items():
                worker.silence_s += TICK_S
                if worker.silence_s > (SILENCE_S if worker.serves else START_S):
                    _log.error("worker %d does not respond and is killed", number, extra={"pid": worker.pid})
                    worker.send_signal(signal.SIGKILL)

    def _guide(self) -> None:
        """Sends the workers Triton's state, and assigns the connections of workers that do not serve."""
        serving = [number for number, worker in self._running.items() if worker.serves]
        orphans = [number for number in self._numbers if number not in serving]
        faults = self._health.faults
        for place, number in enumerate(serving):
            listens_on = frozenset([number, *orphans[place :: len(serving)]])
            self._running[number].guide(Guidance(listens_on, faults))

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send_signal(number)

    @property
    def _workers(self) -> list[WorkerProcess]:
        return list(self._running.values())

    @property
    def _numbers(self) -> range:
        return range(1, len(self._failed_starts) + 1)
