"""Detects a model that does not answer although Triton is live, and makes it not ready.

A model that completes nothing for longer than any request may take is reloaded. If this does not help, Triton is
restarted if possible. A slow model or a full queue is not a hung model: requests that nobody waits for count too.
"""

import asyncio
import logging
import time

from app.domain.backoff import Backoff
from app.domain.errors import GatewayError
from app.triton.breaker import FAILURES
from app.triton.canaries import Canaries, Canary
from app.triton.engine import TritonEngine
from app.triton.examination import Verdict, examine, hung_after_s
from app.triton.health import TritonHealth
from app.triton.stuck import UNANSWERED, Restart

POLL_S = 1.0
CANARIES = 2
"""The number of consecutive canaries without an answer, after which a model is not ready."""
RELOAD_S = 60.0
"""Timeout of a reload. In a Triton whose threads are in a deadlock, a reload does not end."""
FIRST_RESTART_S = 60.0
LONGEST_RESTART_S = 3600.0
"""Longest time between two restarts. They end the requests of all models, and may not help a model that hangs again."""
_log = logging.getLogger(__name__)


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
        self._silences_s: dict[str, float] = {}
        """How long a model must be silent until it is not ready. It grows when a slow model was silent that long."""

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
        canary = self._canary(model)
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
        """Reloads the model and the models that it runs, except models whose own canary is answered."""
        async with self._reloading:
            for name in sorted(self._health.stubs.run_by(model) - {model}):
                if await self._verdict(name) is not Verdict.WORKS:
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

    async def _verdict(self, model: str) -> Verdict:
        """Examines a model that has answered before."""
        canary = self._canary(model)
        if canary is None or not self._progress.has_answered(model):
            return Verdict.UNKNOWN
        began, method = time.monotonic(), "ModelStreamInfer" if canary.is_decoupled else "ModelInfer"
        verdict = await examine(self._engine, self._progress, canary, method)
        return Verdict.WORKS if self._progress.has_answered_since(model, began) else verdict

    def _canary(self, model: str) -> Canary | None:
        return next((canary for canary in self._canaries.all() if canary.request.model == model), None)
