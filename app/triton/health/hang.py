"""Detects a Triton and models that answer nothing although Triton is live, and restarts or reloads them if possible.

``examine`` distinguishes a busy model from a hung one. ``StuckWatch`` decides about the whole Triton, ``HungModels``
about each model.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from app.core.aio import Backoff
from app.core.errors import DeadlineExceeded, GatewayError, Unavailable
from app.core.inference import Deadline
from app.triton.engine import TritonEngine
from app.triton.health.canaries import Canaries, Canary, answer, canary_of
from app.triton.health.health import FAILURES, Progress, TritonHealth
from app.triton.health.repair import Turn, alone

HUNG_S = 60.0
"""A model hangs if it completes nothing for this time. Slower canaries and longer deadlines extend this time."""


class Verdict(Enum):
    WORKS = auto()
    """The model answers, or it is busy."""
    SILENT = auto()
    UNKNOWN = auto()
    """Triton, its statistics or the model cannot be reached."""


async def examine(engine: TritonEngine, progress: Progress, canary: Canary, method: str) -> Verdict:
    """Sends the canary with the gRPC method ``method``, and distinguishes a busy model from a hung one.

    Triton executes requests although their callers do not wait any more. So a model that answers nothing in time may be
    busy for minutes. Triton's statistics count the requests that it completes in this time.
    """
    timeout_s = progress.timeout_s(canary.request.model)
    canary = replace(canary, is_decoupled=method == "ModelStreamInfer")
    try:
        before = await _completed(engine, canary)
        if await _is_answered(engine, canary, timeout_s):
            return Verdict.WORKS
        after = await _completed(engine, canary)
    except GatewayError:
        return Verdict.UNKNOWN
    return Verdict.WORKS if _is_busy(canary, before, after, timeout_s) else Verdict.SILENT


def hung_after_s(canary: Canary, progress: Progress) -> float:
    """Returns how long the model must be silent until it counts as hung: longer than any request may take."""
    return max(HUNG_S, progress.timeout_s(canary.request.model), canary.deadline_s)


async def _is_answered(engine: TritonEngine, canary: Canary, timeout_s: float) -> bool:
    """Raises Unavailable. Other errors are answers."""
    try:
        await answer(engine, canary, Deadline.after(timeout_s))
    except DeadlineExceeded:
        return False
    except Unavailable:
        raise
    except GatewayError:
        pass
    return True


@dataclass(frozen=True, slots=True)
class _Completed:
    """The executions of a model since it was loaded, and its successful requests with their total time in Triton."""

    executions: int
    requests: int
    request_ns: int

    def average_s_since(self, earlier: "_Completed") -> float:
        requests = self.requests - earlier.requests
        return (self.request_ns - earlier.request_ns) / requests / 1e9 if requests > 0 else 0.0


async def _completed(engine: TritonEngine, canary: Canary) -> dict[str, _Completed]:
    """By model that the canary uses. Raises GatewayError, also if the server has no statistics."""
    return {model: _sum_of(await engine.document("stats", model)) for model in canary.models}


def _sum_of(statistics: Mapping[str, Any]) -> _Completed:
    versions = statistics["model_stats"]
    successes = [version["inference_stats"]["success"] for version in versions]
    return _Completed(
        sum(version["execution_count"] for version in versions),
        sum(success["count"] for success in successes),
        sum(success["ns"] for success in successes),
    )


def _is_busy(
    canary: Canary, before: Mapping[str, _Completed], after: Mapping[str, _Completed], timeout_s: float
) -> bool:
    """Whether other requests explain that the canary was not answered.

    The canary itself counts as an execution of an ensemble's steps and, before its response, of a decoupled model.
    So these are busy only if the completed requests took about as long as the canary waited.
    """
    model = canary.request.model
    if not canary.is_decoupled and after[model].executions != before[model].executions:
        return True
    return sum(after[name].average_s_since(before[name]) for name in after) >= timeout_s / 2


POLL_S = 1.0
UNANSWERED = 2
"""The number of consecutive calls without an answer that starts an examination with canaries."""
FIRST_DELAY_S = 1.0
_MOST_CANARIES = 4
_LONGEST_DELAY_S = 30.0
_log = logging.getLogger(__name__)

Restart = Callable[[], Awaitable[None]]


class StuckWatch:
    """Detects a Triton that is live but does not answer inference calls, and restarts it if possible.

    ``restart``: None for a Triton that the gateway did not start.
    """

    def __init__(
        self, engine: TritonEngine, progress: Progress, canaries: Canaries, *, restart: Restart | None = None
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._canaries = canaries
        self._restart = restart

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            for method, count in list(self._progress.unanswered.items()):
                if count >= UNANSWERED:
                    await self._examine(method)

    async def _examine(self, method: str) -> None:
        if not await self._is_silent(method):
            self._progress.unanswered[method] = 0
            return
        self._progress.is_stuck = True
        _log.error("Triton is stuck: it is live, but answers no %s call", method)
        await self._restart_if_possible()
        await self._recover(method)
        self._progress.is_stuck = False
        _log.info("Triton answers %s calls again", method)

    async def _is_silent(self, method: str) -> bool:
        """Whether every examined model hangs, and no other call is answered in the meantime."""
        hung_after = [hung_after_s(canary, self._progress) for canary in self._fitting(method)]
        answers, ends = self._progress.answers[method], time.monotonic() + max(hung_after, default=0.0)
        while await self._verdict(method) is Verdict.SILENT and self._progress.answers[method] == answers:
            if time.monotonic() >= ends:
                return True
        return False

    async def _recover(self, method: str) -> None:
        backoff = Backoff(FIRST_DELAY_S, _LONGEST_DELAY_S)
        while (verdict := await self._verdict(method)) is not Verdict.WORKS:
            if verdict is Verdict.SILENT and await self._is_silent(method):
                await self._restart_if_possible()
            await asyncio.sleep(backoff.fail())

    async def _restart_if_possible(self) -> None:
        if self._restart is not None:
            _log.error("the embedded Triton is restarted, because it is stuck")
            await self._restart()

    async def _verdict(self, method: str) -> Verdict:
        """Sends canaries to models that have answered before. One model that works is enough."""
        verdicts = await asyncio.gather(
            *(examine(self._engine, self._progress, canary, method) for canary in self._fitting(method))
        )
        for verdict in (Verdict.WORKS, Verdict.UNKNOWN):
            if verdict in verdicts:
                return verdict
        return Verdict.SILENT if verdicts else Verdict.UNKNOWN

    def _fitting(self, method: str) -> list[Canary]:
        return [canary for canary in self._canaries.all() if self._fits(canary, method)][:_MOST_CANARIES]

    def _fits(self, canary: Canary, method: str) -> bool:
        """Triton answers ModelStreamInfer for every model, ModelInfer only for models that are not decoupled."""
        return self._progress.has_answered(canary.request.model) and not (
            canary.is_decoupled and method == "ModelInfer"
        )


CANARIES = 2
"""The number of consecutive canaries without an answer, after which a model is not ready."""
RELOAD_S = 60.0
"""Timeout of a reload. In a Triton whose threads are in a deadlock, a reload does not end."""
FIRST_RESTART_S = 60.0
LONGEST_RESTART_S = 3600.0
"""Longest time between two restarts. They end the requests of all models, and may not help a model that hangs again."""


class HungModels:
    """Detects models of one Triton that do not answer although Triton is live, and makes them not ready.

    A model that completes nothing for longer than any request may take is reloaded. If this does not help, Triton is
    restarted if possible. A slow model or a full queue is not a hung model: requests that nobody waits for count too.

    ``restart``: None for a Triton that the gateway did not start.
    """

    def __init__(
        self,
        engine: TritonEngine,
        health: TritonHealth,
        canaries: Canaries,
        *,
        may_reload: bool,
        restart: Restart | None = None,
    ) -> None:
        self.turn: Turn = alone
        self._engine = engine
        self._health = health
        self._progress = health.progress
        self._canaries = canaries
        self._may_reload = may_reload
        self._restart = restart
        self._restarts = Backoff(FIRST_RESTART_S, LONGEST_RESTART_S)
        self._reloading = asyncio.Lock()
        self._examined: set[str] = set()
        self._silences_s: dict[str, float] = {}
        """How long a model must be silent until it is not ready. It grows when a slow model was silent that long."""

    async def run(self) -> None:
        """Runs until cancelled. Each suspected model has a task of its own."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(POLL_S)
                for model, count in list(self._progress.unanswered_by_model.items()):
                    is_due = count >= UNANSWERED and not self._progress.may_be_busy(model)
                    if is_due and model not in self._examined:
                        self._examined.add(model)
                        group.create_task(self._examine(model))

    async def _examine(self, model: str) -> None:
        began = time.monotonic()
        try:
            if await self._is_silent(model, self._silences_s.get(model, 0.0)):
                await self._refuse_while_silent(model, began)
        finally:
            self._progress.unanswered_by_model.pop(model, None)
            self._examined.discard(model)

    async def _is_silent(self, model: str, for_s: float) -> bool:
        """Whether the model completes nothing for this time, and for as many calls as open a breaker."""
        ends = time.monotonic() + for_s
        canaries = 0
        while canaries < CANARIES or self._progress.unanswered_by_model[model] < FAILURES or time.monotonic() < ends:
            if self._progress.is_stuck or await self._verdict(model) is not Verdict.SILENT:
                return False
            canaries += 1
        return True

    async def _refuse_while_silent(self, model: str, since: float) -> None:
        self._health.hung_models.add(model)
        _log.error("model '%s' does not answer although Triton is live: it is not ready", model)
        try:
            if await self._hangs(model):
                await self._repair(model)
            elif not self._progress.is_stuck:
                self._silences_s[model] = 2 * (time.monotonic() - since)
        finally:
            self._health.restart_wanted_by.discard(model)
            self._health.hung_models.discard(model)
        _log.info("model '%s' works again, or Triton cannot be reached", model)

    async def _repair(self, model: str) -> None:
        if self._may_reload:
            await self._reload(model)
            if not await self._hangs(model):
                return
        await self._ask_for_restart(model)
        while await self._hangs(model):
            await self._ask_for_restart(model)

    async def _hangs(self, model: str) -> bool:
        """Waits until the model works, or counts as hung."""
        canary = canary_of(self._canaries, model)
        if canary is None:
            return False
        after_s = hung_after_s(canary, self._progress)
        if not await self._is_silent(model, after_s):
            return False
        _log.error("model '%s' hangs: it has completed no request for %g s", model, after_s)
        return True

    async def _ask_for_restart(self, model: str) -> None:
        """Restarts an embedded Triton. For another one, `/health/triton` shows that a restart is needed."""
        self._health.restart_wanted_by.add(model)
        if self._restart is None or not self._restarts.is_due:
            return
        if time.monotonic() - self._restarts.due_at > LONGEST_RESTART_S:
            self._restarts.reset()
        self._restarts.fail()
        _log.error("the embedded Triton is restarted, because model '%s' hangs", model)
        await self._restart()

    async def _reload(self, model: str) -> None:
        """Reloads the model and the models that it runs, except models whose own canary is answered.

        No-op while another process of the gateway repairs Triton.
        """
        async with self._reloading:
            with self.turn() as is_own:
                for name in sorted(self._health.stubs.run_by(model) - {model}) if is_own else ():
                    if await self._verdict(name) is not Verdict.WORKS:
                        await self._reload_one(name)
                if is_own:
                    await self._reload_one(model)

    async def _reload_one(self, model: str) -> None:
        try:
            async with asyncio.timeout(RELOAD_S):
                await self._engine.reload_model(model)
        except TimeoutError:
            _log.error("model '%s' could not be loaded again within %g s", model, RELOAD_S)
        except GatewayError as exc:
            _log.error("model '%s' could not be loaded again: %s", model, exc.detail)
        else:
            _log.info("model '%s' was unloaded and loaded again", model)

    async def _verdict(self, model: str) -> Verdict:
        """Examines a model that has answered before."""
        canary = canary_of(self._canaries, model)
        if canary is None or not self._progress.has_answered(model):
            return Verdict.UNKNOWN
        began, method = time.monotonic(), "ModelStreamInfer" if canary.is_decoupled else "ModelInfer"
        verdict = await examine(self._engine, self._progress, canary, method)
        return Verdict.WORKS if self._progress.has_answered_since(model, began) else verdict
