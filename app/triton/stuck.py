"""Detects a Triton that is live but does not answer inference calls, and restarts it if possible."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from app.domain.backoff import Backoff
from app.triton.canaries import Canaries, Canary
from app.triton.engine import TritonEngine
from app.triton.examination import Verdict, examine, hung_after_s
from app.triton.progress import Progress

POLL_S = 1.0
UNANSWERED = 2
"""The number of consecutive calls without an answer that starts an examination with canaries."""
FIRST_DELAY_S = 1.0
_MOST_CANARIES = 4
_LONGEST_DELAY_S = 30.0
_log = logging.getLogger(__name__)

Restart = Callable[[], Awaitable[None]]


class StuckWatch:
    """Watches one Triton. ``restart``: None for a Triton that the gateway did not start."""

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
