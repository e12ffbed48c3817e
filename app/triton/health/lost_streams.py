"""Ends the streams that Triton will never continue.

Triton 2.51 does not end a stream whose model process died, not even when the model is loaded again. And a connection to
a host that is gone stays open for a long time.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

from app.core.aio import BackgroundTasks
from app.core.engine import InferenceServer
from app.core.errors import GatewayError, ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.inference import Deadline
from app.triton.engine import RunningStream, TritonEngine
from app.triton.errors import REPAIR_S
from app.triton.health.canaries import Canaries, answer
from app.triton.health.health import TritonHealth

POLL_S = 0.25
DEAD_S = 0.5
"""A stream of a dead process has been silent at least this long, because Triton needs a second to report the death."""
SILENT_S = 2.0
"""A stream that has begun is examined after this silence,"""
TIMES = 5.0
"""and this many times its longest silence so far."""
COUNT_S = 2.0
"""How often the statistics of models with running streams are read."""
CANARY_S = 10.0


class LostStreams:
    """Watches the streams of one Triton that this process reads."""

    def __init__(self, engine: TritonEngine, health: TritonHealth, canaries: Canaries) -> None:
        self._engine = engine
        self._health = health
        self._canaries = canaries
        self._reloads = Reloads(engine)
        self._examined: set[str] = set()
        self._tasks = BackgroundTasks()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            for stream in self._engine.streams:
                self._look_at(stream)
            if self._engine.streams and self._reloads.is_due:
                self._tasks.start(
                    self._reloads.look({model for each in self._engine.streams for model in self._of(each)})
                )

    def _look_at(self, stream: RunningStream) -> None:
        stream.sample()
        if self._is_of_dead_process(stream):
            stream.end(
                ModelNotReady("The process of the model died before the stream was complete.", retry_after_s=REPAIR_S)
            )
        elif stream.silent_s >= max(self._limit_s(stream), 2 * stream.examined_s):
            stream.examined_s = stream.silent_s
            if stream.model not in self._examined:
                self._examined.add(stream.model)
                self._tasks.start(self._examine(stream.model))

    def _is_of_dead_process(self, stream: RunningStream) -> bool:
        """Another instance of the model may be alive, so with several instances the stream gets more time."""
        stubs = self._health.stubs
        if not stubs.has_died_since(stream.began, stream.model):
            return False
        return stream.silent_s >= (DEAD_S if stubs.instances(stream.model) == 1 else self._timeout_s(stream))

    async def _examine(self, model: str) -> None:
        """Finds out why streams are silent. A canary that meets a dead process makes its model a suspect."""
        asked_at = time.monotonic()
        try:
            if not await self._engine.answers():
                self._end_silent(
                    asked_at, UpstreamUnavailable("Triton stopped answering before the stream was complete.")
                )
                return
            for stream in self._engine.streams:
                if stream.silent_s >= self._timeout_s(stream) and self._reloads.is_after(
                    stream.began, self._of(stream)
                ):
                    stream.end(ModelNotReady("The model was loaded again before the stream was complete."))
            canary = next((each for each in self._canaries.all() if each.request.model == model), None)
            if canary is not None:
                with suppress(GatewayError):
                    await answer(self._engine, canary, Deadline.after(CANARY_S))
        finally:
            self._examined.discard(model)

    def _end_silent(self, asked_at: float, error: Unavailable) -> None:
        """Ends the streams that were silent for too long when Triton was asked, and are still."""
        for stream in self._engine.streams:
            if stream.silent_s - (time.monotonic() - asked_at) >= self._limit_s(stream):
                stream.end(error)

    def _limit_s(self, stream: RunningStream) -> float:
        """The silence after which a stream is examined."""
        timeout_s = self._timeout_s(stream)
        return min(timeout_s, max(SILENT_S, TIMES * stream.longest_s)) if stream.has_begun else timeout_s

    def _timeout_s(self, stream: RunningStream) -> float:
        return self._health.progress.timeout_s(stream.model)

    def _of(self, stream: RunningStream) -> set[str]:
        return self._health.stubs.run_by(stream.model)


class Reloads:
    """Detects models that any client of Triton has reloaded: their statistics begin again at 0."""

    def __init__(self, engine: InferenceServer) -> None:
        self._engine = engine
        self._counts: dict[str, tuple[float, int]] = {}
        """Model -> when its statistics were read, in monotonic seconds, and its number of requests then."""
        self._latest: dict[str, float] = {}
        """Model -> a time before its latest reload."""
        self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    def is_after(self, began: float, models: Iterable[str]) -> bool:
        """Whether one of the models was certainly reloaded after ``began``."""
        return any(self._latest.get(model, began) > began for model in models)

    async def look(self, models: Iterable[str]) -> None:
        self._due_at = time.monotonic() + COUNT_S
        for model in models:
            with suppress(GatewayError):
                await self._count(model)

    async def _count(self, model: str) -> None:
        now = time.monotonic()
        found = (await self._engine.document("stats", model))["model_stats"]
        results = [each["inference_stats"][result] for each in found for result in ("success", "fail")]
        count = sum(result["count"] for result in results)
        if model in self._counts and count < self._counts[model][1]:
            self._latest[model] = self._counts[model][0]
        self._counts[model] = now, count
