"""Detects a model that does not answer although Triton is live. Reloads it, then restarts Triton if possible."""

import asyncio
import logging
import time
from enum import Enum, auto

from app.domain.backoff import Backoff
from app.domain.deadline import Deadline
from app.domain.errors import DeadlineExceeded, GatewayError, Unavailable
from app.triton.breaker import FAILURES
from app.triton.canaries import Canaries, Canary, answer
from app.triton.engine import TritonEngine
from app.triton.health import TritonHealth
from app.triton.stuck import UNANSWERED, Restart

POLL_S = 1.0
CANARIES = 2
"""The number of consecutive canaries without an answer that confirm that a model hangs."""
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 10.0
RELOAD_S = 60.0
"""Timeout of a reload. In a Triton whose threads are in a deadlock, a reload does not end."""
FIRST_RESTART_S = 60.0
LONGEST_RESTART_S = 3600.0
"""Longest time between two restarts. They end the requests of all models, and may not help a model that hangs again."""
_log = logging.getLogger(__name__)


class _Verdict(Enum):
    ANSWERS = auto()
    TIMES_OUT = auto()
    UNKNOWN = auto()
    """Triton cannot be reached, has not loaded the model, or there is no canary."""


class HungModels:
    """Watches the models of one Triton. ``restart``: None for a Triton that the gateway did not start."""

    def __init__(
        self,
        engine: TritonEngine,
        health: TritonHealth,
        canaries: Canaries,
        *,
        may_reload: bool,
        restart: Restart | None = None,
    ) -> None:
        self._engine = engine
        self._health = health
        self._progress = health.progress
        self._canaries = canaries
        self._may_reload = may_reload
        self._restart = restart
        self._restarts = Backoff(FIRST_RESTART_S, LONGEST_RESTART_S)
        self._reloading = asyncio.Lock()
        self._examined: set[str] = set()

    async def run(self) -> None:
        """Runs until cancelled. Each suspected model has a task of its own."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(POLL_S)
                for model, count in list(self._progress.unanswered_by_model.items()):
                    if count >= UNANSWERED and model not in self._examined:
                        self._examined.add(model)
                        group.create_task(self._examine(model))

    async def _examine(self, model: str) -> None:
        try:
            if await self._hangs(model):
                await self._recover(model)
        finally:
            self._progress.unanswered_by_model.pop(model, None)
            self._examined.discard(model)

    async def _hangs(self, model: str) -> bool:
        """Whether as many calls as open a breaker were not answered, and the last of them were canaries."""
        canaries = 0
        while canaries < CANARIES or self._unanswered(model) < FAILURES:
            before = self._unanswered(model)
            if self._progress.is_stuck or await self._verdict(model) is not _Verdict.TIMES_OUT:
                return False
            if self._unanswered(model) <= before:
                return False  # another call was answered
            canaries += 1
        return not self._progress.is_stuck

    def _unanswered(self, model: str) -> int:
        return self._progress.unanswered_by_model[model]

    async def _recover(self, model: str) -> None:
        self._health.hung_models.add(model)
        _log.error("model '%s' hangs: Triton is live, but %d calls of the model got no answer", model, FAILURES)
        if self._may_reload:
            await self._reload(model)
        await self._until_answered(model)
        self._health.restart_wanted_by.discard(model)
        self._health.hung_models.discard(model)
        self._health.breakers.close(model)
        _log.info("model '%s' answers again", model)

    async def _until_answered(self, model: str) -> None:
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while (verdict := await self._verdict(model)) is not _Verdict.ANSWERS:
            if verdict is _Verdict.TIMES_OUT:
                await self._ask_for_restart(model)
            else:
                self._health.restart_wanted_by.discard(model)
            await asyncio.sleep(backoff.fail())

    async def _ask_for_restart(self, model: str) -> None:
        """Restarts an embedded Triton. For another one, `/health/triton` shows that a restart is needed."""
        if not self._restarts.is_due:
            return
        if time.monotonic() - self._restarts.due_at > LONGEST_RESTART_S:
            self._restarts.reset()
        self._restarts.fail()
        self._health.restart_wanted_by.add(model)
        if self._restart is not None:
            _log.error("the embedded Triton is restarted, because model '%s' hangs", model)
            await self._restart()

    async def _reload(self, model: str) -> None:
        """Reloads the model and the models that it runs, except models whose own canary is answered."""
        async with self._reloading:
            for name in sorted(self._health.stubs.run_by(model) - {model}):
                if await self._verdict(name) is not _Verdict.ANSWERS:
                    await self._reload_one(name)
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

    async def _verdict(self, model: str) -> _Verdict:
        """Sends a canary to a model that has answered before."""
        canary = self._canary(model)
        if canary is None or not self._progress.has_answered(model):
            return _Verdict.UNKNOWN
        try:
            await answer(self._engine, canary, Deadline.after(self._progress.timeout_s(model)))
        except DeadlineExceeded:
            return _Verdict.TIMES_OUT if await self._engine.answers() else _Verdict.UNKNOWN
        except Unavailable:
            return _Verdict.UNKNOWN
        except GatewayError:
            pass  # an error of the model is an answer
        return _Verdict.ANSWERS

    def _canary(self, model: str) -> Canary | None:
        return next((canary for canary in self._canaries.all() if canary.request.model == model), None)
