"""Confirms that a process or engine died, reloads the model if allowed, and detects when the model works again."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from app.core.aio import Backoff
from app.core.engine import discard_stream
from app.core.errors import GatewayError
from app.core.inference import Deadline
from app.triton.engine import TritonEngine
from app.triton.health.canaries import Canaries, Canary, canary_of
from app.triton.health.python_backend import Stubs

POLL_S = 0.5
CANARY_S = 10.0
"""Timeout of a canary. Triton needs up to 4 s to detect a dead process."""
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
"""Longest delay between two reloads of a model."""
LONGEST_LOOK_S = 10.0
"""Longest interval between checks of a model that the gateway must not reload."""
_FORGIVEN_S = 300.0
"""After this time without a fault since its last repair, a model starts again with the first delay."""
_MOST_CANARIES = 8
_REFUSED = "explicit model load / unload is not allowed"
_log = logging.getLogger(__name__)


Turn = Callable[[], AbstractContextManager[bool]]
"""A block in which no other process of the gateway repairs Triton. Its value is false if another one does now."""


def alone() -> AbstractContextManager[bool]:
    """The turn of the only process."""
    return nullcontext(enter_result=True)


class StubRepair:
    """Repairs one model at a time."""

    def __init__(self, engine: TritonEngine, stubs: Stubs, canaries: Canaries, *, may_reload: bool) -> None:
        self.turn: Turn = alone
        self._engine = engine
        self._stubs = stubs
        self._canaries = canaries
        self._may_reload = may_reload
        self._backoffs: dict[str, Backoff] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._stubs.suspects or self._stubs.dead:
                with self.turn() as is_own:
                    await self._look(is_alone=is_own)

    async def _look(self, *, is_alone: bool) -> None:
        """If another process repairs now, its repair may end the fault: the suspicions begin anew after it."""
        for called in self._stubs.suspects:
            if not is_alone:
                self._stubs.acquit(called)
            elif self._stubs.is_alive(called):
                await self._confirm(called)
        for model in self._stubs.dead if is_alone else ():
            if self._backoff(model).is_due:
                await self._repair(model)

    async def _confirm(self, called: str) -> None:
        """Confirms the death of a process or engine by the model's sample; without a sample, by repeated errors."""
        canary = canary_of(self._canaries, called)
        dead = self._stubs.repeated(called) if canary is None else await self._dead_process(called)
        if dead is not None:
            self._stubs.condemn(dead)
        if dead is not None or canary is not None:
            self._stubs.acquit(called)

    async def _repair(self, model: str) -> None:
        backoff = self._backoff(model)
        backoff.longest_s = LONGEST_DELAY_S if self._may_reload else LONGEST_LOOK_S
        backoff.fail()
        if self._may_reload and not await self._load_again(model):
            return
        called = self._sampled(model)
        if called is None:
            self._stubs.revive(model, is_proven=False)
        elif not await self._is_still_dead(model, called):
            self._stubs.revive(model)

    async def _load_again(self, model: str) -> bool:
        return all([await self._reload(each) for each in self._stubs.to_load_again(model)])

    async def _reload(self, model: str) -> bool:
        try:
            await self._engine.reload_model(model)
        except GatewayError as exc:
            if exc.upstream is not None and _REFUSED in exc.upstream.message:
                self._may_reload = self._stubs.are_repaired = False
                _log.error("GATEWAY_TRITON_REPAIR needs a Triton with --model-control-mode=explicit; it is ignored")
            else:
                _log.error("model '%s' could not be loaded again: %s", model, exc.detail)
            return False
        _log.info("model '%s' was unloaded and loaded again", model)
        return True

    def _sampled(self, model: str) -> str | None:
        """Returns the model itself, or one that runs it, whose sample tells whether it works; None without a sample.

        Then the next request decides.
        """
        sampled = [
            each.request.model for each in self._canaries.all() if model in self._stubs.run_by(each.request.model)
        ]
        return model if model in sampled else next(iter(sampled), None)

    async def _is_still_dead(self, model: str, called: str) -> bool:
        dead = await self._dead_process(called)
        return dead == model or (dead is not None and model in self._stubs.dead_engines)

    async def _dead_process(self, called: str) -> str | None:
        """Returns the model whose process is dead, or None. A canary tests one instance, so several canaries run."""
        for _ in range(min(2 * self._stubs.instances(called), _MOST_CANARIES)):
            canary = canary_of(self._canaries, called)
            message = await self._error_of(canary) if canary is not None else ""
            if (dead := self._stubs.owner(called, message)) is not None:
                return dead
        return None

    async def _error_of(self, canary: Canary) -> str:
        """Returns Triton's message; empty if the canary succeeded. A stream works for every model."""
        try:
            await discard_stream(self._engine, canary.request, Deadline.after(CANARY_S))
        except GatewayError as exc:
            return exc.upstream.message if exc.upstream is not None else ""
        return ""

    def _backoff(self, model: str) -> Backoff:
        """Returns the delays. The first reload is immediate; without reloads, each check waits."""
        now = time.monotonic()
        backoff = self._backoffs.get(model)
        if backoff is None or now - backoff.due_at > _FORGIVEN_S:
            due_at = now if self._may_reload else now + FIRST_DELAY_S
            backoff = self._backoffs[model] = Backoff(FIRST_DELAY_S, due_at=due_at)
        return backoff
