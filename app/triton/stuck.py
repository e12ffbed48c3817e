"""Detects a Triton that is live but does not answer inference calls, and restarts it if possible."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from enum import Enum, auto

from app.domain.backoff import Backoff
from app.domain.deadline import Deadline
from app.domain.errors import DeadlineExceeded, GatewayError, UpstreamUnavailable
from app.domain.inference import InferenceResponse
from app.triton.canaries import Canaries, Canary
from app.triton.engine import TritonEngine
from app.triton.progress import Progress

POLL_S = 1.0
UNANSWERED = 2
"""The number of consecutive calls without an answer that starts an examination with canaries."""
FIRST_DELAY_S = 1.0
_MOST_CANARIES = 4
_LONGEST_DELAY_S = 30.0
_log = logging.getLogger(__name__)

Restart = Callable[[], Awaitable[None]]


class _Verdict(Enum):
    MOVES = auto()
    TIMES_OUT = auto()
    UNKNOWN = auto()
    """Triton cannot be reached, or there is no canary."""


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
        """Returns whether two rounds of canaries timed out and no other call was answered in the meantime."""
        answers = self._progress.answers[method]
        for _ in range(2):
            if await self._verdict(method) is not _Verdict.TIMES_OUT or self._progress.answers[method] > answers:
                self._progress.unanswered[method] = 0
                return
        self._progress.is_stuck = True
        _log.error("Triton is stuck: it is live, but answers no %s call", method)
        await self._recover(method)
        self._progress.is_stuck = False
        _log.info("Triton answers %s calls again", method)

    async def _recover(self, method: str) -> None:
        await self._restart_if_possible()
        backoff = Backoff(FIRST_DELAY_S, _LONGEST_DELAY_S)
        while True:
            await asyncio.sleep(backoff.fail())
            verdict = await self._verdict(method)
            if verdict is _Verdict.MOVES:
                return
            if verdict is _Verdict.TIMES_OUT:
                await self._restart_if_possible()

    async def _restart_if_possible(self) -> None:
        if self._restart is not None:
            _log.error("the embedded Triton is restarted, because it is stuck")
            await self._restart()

    async def _verdict(self, method: str) -> _Verdict:
        """Sends canaries to models that have answered before. One answered canary is enough."""
        canaries = [canary for canary in self._canaries.all() if self._fits(canary, method)][:_MOST_CANARIES]
        if not canaries or not await self._engine.answers():
            return _Verdict.UNKNOWN
        verdicts = await asyncio.gather(*(self._verdict_of(canary, method) for canary in canaries))
        for verdict in (_Verdict.MOVES, _Verdict.UNKNOWN):
            if verdict in verdicts:
                return verdict
        return _Verdict.TIMES_OUT

    def _fits(self, canary: Canary, method: str) -> bool:
        """Triton answers ModelStreamInfer for every model, ModelInfer only for models that are not decoupled."""
        return self._progress.has_answered(canary.request.model) and not (
            canary.is_decoupled and method == "ModelInfer"
        )

    async def _verdict_of(self, canary: Canary, method: str) -> _Verdict:
        deadline = Deadline.after(self._progress.timeout_s(canary.request.model))
        is_answered = False
        try:
            async with aclosing(self._responses(canary, method, deadline)) as responses:
                async for _ in responses:
                    is_answered = True
        except UpstreamUnavailable:
            return _Verdict.UNKNOWN
        except DeadlineExceeded:
            return _Verdict.MOVES if is_answered else _Verdict.TIMES_OUT
        except GatewayError:
            pass
        return _Verdict.MOVES

    async def _responses(self, canary: Canary, method: str, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        if method == "ModelInfer":
            yield await self._engine.infer(canary.request, deadline)
            return
        async with aclosing(self._engine.infer_stream(canary.request, deadline)) as responses:
            async for response in responses:
                yield response
