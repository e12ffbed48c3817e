"""The loop that watches one Triton. It acts on the table of :mod:`app.triton.health.health`.

It sends canaries: requests that a model should be able to answer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace

from app.core.aio import BackgroundTasks, Backoff
from app.core.engine import Engine, responses_of
from app.core.errors import DeadlineExceeded, GatewayError, ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest
from app.triton.grpc_errors import REPAIR_S
from app.triton.health.health import DEAD, FAILURES, FIRST_DELAY_S, REPEATED, ModelFault, TritonHealth
from app.triton.triton_engine import LOAD_TIMEOUT_S, RunningStream, TritonEngine

POLL_S = 0.25
UNANSWERED = 2
"""The number of consecutive calls without an answer that starts an examination with canaries."""
CANARIES = 2
"""The number of consecutive canaries without an answer, after which a model is not ready."""
LONGEST_CANARY_S = 30.0
"""The longest timeout of a canary that probes or looks for a dead process. Triton needs up to 4 s to detect one."""
HUNG_S = 60.0
"""A model hangs if it completes nothing for this time. Slower canaries and longer deadlines extend this time."""
RELOAD_S = 60.0
"""Timeout of the load of a hung model. In a Triton whose threads are in a deadlock, a reload does not end."""
LONGEST_DELAY_S = 60.0
"""Longest delay between two reloads of a model with a dead process."""
LONGEST_LOOK_S = 10.0
"""Longest interval between checks of a model that the gateway must not reload."""
FIRST_RESTART_S = 60.0
LONGEST_RESTART_S = 3600.0
"""Longest time between two restarts. They end the requests of all models, and may not help a model that hangs again."""
DEAD_S = 0.5
"""A stream of a dead process has been silent at least this long, because Triton needs a second to report the death."""
COUNT_S = 2.0
"""How often the statistics of models with running streams are read."""
_MOST_CANARIES = 8
_MOST_MODELS = 4
"""The number of models that are examined to find out whether Triton is stuck."""
_REFUSED = "explicit model load / unload is not allowed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Canary:
    """A request that the model should be able to answer, made from a pipeline's ``sample``."""

    request: InferenceRequest
    is_decoupled: bool
    deadline_s: float
    """The longest deadline of a pipeline that uses the called model, or a model that it runs."""


Canaries = Callable[[], Mapping[str, Canary]]
"""Returns a new canary for each model whose pipeline has a sample."""
Restart = Callable[[], Awaitable[None]]
Turn = Callable[[], AbstractContextManager[bool | None]]
"""A block in which no other process of the gateway repairs Triton. Its value is true if another one does now."""


@dataclass(slots=True, eq=False)
class HealthWatch:
    """Each suspicion, each repair and each group of silent streams has a task of its own while it lasts."""

    engine: TritonEngine
    health: TritonHealth
    canaries: Canaries
    restart: Restart | None = None
    """None for a Triton that the gateway did not start."""
    turn: Turn = nullcontext
    _restarts: Backoff = field(
        default_factory=lambda: Backoff(FIRST_RESTART_S, LONGEST_RESTART_S, forgiven_s=LONGEST_RESTART_S)
    )
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _counts: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Model -> when its statistics were read, in monotonic seconds, and its number of requests then."""

    async def run(self) -> None:
        """Runs until cancelled."""
        health, engine, tasks, count_at = self.health, self.engine, BackgroundTasks(), 0.0
        try:
            while True:
                await asyncio.sleep(POLL_S)
                for model in health.with_fault(ModelFault.OPEN):
                    if health.models[model].probes.is_due:
                        tasks.start(self._probe(model), ("open", model))
                if health.suspects or health.with_fault(*DEAD):
                    tasks.start(self._confirm_and_repair(), "dead")
                for (model, method), calls in list(health.calls.items()):
                    if calls.unanswered >= UNANSWERED and not health.may_be_busy(model, calls):
                        if self._canaries_by(method, model):
                            tasks.start(self._examine(model, method), ("silent", model))
                        else:  # only other models can tell whether Triton is stuck
                            health.calls_of("", method).unanswered = FAILURES
                            calls.unanswered = 0
                for stream in list(engine.streams):
                    if self._is_silent_stream(stream):
                        tasks.start(self._examine_streams(stream.model), ("stream", stream.model))
                if engine.streams and time.monotonic() >= count_at:
                    count_at = time.monotonic() + COUNT_S
                    tasks.start(self._count(), "counts")
        finally:
            await tasks.close(within_s=0)

    async def _is_answered(self, model: str) -> bool | None:
        """Whether the model answers a canary. None without one, or if the model or Triton is unavailable."""
        if (canary := self.canaries().get(model)) is None:
            return None
        return await is_answered(self.engine, canary, min(self.health.models[model].canary_s, LONGEST_CANARY_S))

    async def _probe(self, model: str) -> None:
        """Without a sample, or while Triton is unreachable, checks if the model is ready."""
        state, is_working = self.health.models[model], True
        try:
            is_working = await self.engine.model_ready(model)
        except GatewayError as exc:
            is_working = not isinstance(exc, Unavailable)
        if is_working and state.probes.longest_s > state.probes.first_s and model in self.canaries():
            is_working = await self._is_answered(model) is True
        if is_working:
            state.failures = 0
            self.health.end(ModelFault.OPEN, model)
        else:
            state.probes.fail()

    # Dead processes and engines

    async def _confirm_and_repair(self) -> None:
        """One model at a time. The model's sample confirms a suspicion; without a sample, repeated errors do.

        If another process repairs now, its repair may end the fault: the suspicions begin again after it. A reload
        during the streams of a dead process can abort Triton 2.51: a repair begins after FIRST_DELAY_S, when they have
        ended (:meth:`_is_silent_stream`). Without a sample of the model, or of one that runs it, the next request
        decides whether the repair helped.
        """
        health = self.health
        with self.turn() as is_other:
            if is_other:
                health.suspects.clear()
                return
            for called, named in list(health.suspects.items()):
                if not DEAD.isdisjoint(health.faults_of(called)):
                    continue
                if await self._meets_dead_part(called) is None:
                    ((part, count),) = named.most_common(1)
                    if count < REPEATED:
                        continue
                    health.begin(*part)
                health.suspects.pop(called, None)
            for model in health.with_fault(*DEAD):
                state, asked_at = health.models[model], time.monotonic()
                if not state.repairs.is_due or asked_at - state.ended_at < FIRST_DELAY_S:
                    continue
                state.repairs.longest_s = LONGEST_DELAY_S if health.may_reload else LONGEST_LOOK_S
                state.repairs.fail()
                is_engine = (ModelFault.ENGINE, model) in health.faults
                # the message about an engine names no model, so below an ensemble or BLS model any engine may be dead
                names = health.run_by(model) if is_engine else [model]
                if health.may_reload and not all([await self._reloads(name) for name in names]):
                    continue
                sampled = [called for called in self.canaries() if model in health.run_by(called)]
                is_dead = await self._meets_dead_part(model if model in sampled else next(iter(sampled), ""))
                if not is_dead or not (is_engine or state.ended_at > asked_at):
                    health.revive(model, is_proven=is_dead is not None)

    async def _meets_dead_part(self, called: str) -> bool | None:
        """Whether a canary meets a dead process or engine; None without a canary. Each canary tests one instance."""
        asked_at = time.monotonic()
        if called not in self.canaries():
            return None
        for _ in range(min(2 * self.health.instances(called), _MOST_CANARIES)):
            await self._is_answered(called)
            if self.health.has_ended_since(asked_at, called):
                return True
        return False

    async def _reloads(self, model: str, timeout_s: float = LOAD_TIMEOUT_S) -> bool:
        """Whether the model could be loaded again."""
        try:
            await self.engine.reload_model(model, timeout_s)
        except GatewayError as exc:
            if exc.upstream is not None and _REFUSED in exc.upstream.message:
                self.health.may_reload = False
                _log.error("GATEWAY_TRITON_REPAIR needs a Triton with --model-control-mode=explicit; it is ignored")
            else:
                _log.error("model '%s' could not be loaded again: %s", model, exc.detail)
            return False
        _log.info("model '%s' was unloaded and loaded again", model)
        return True

    # Silence

    async def _examine(self, model: str, method: str) -> None:
        """Follows the silence of a model, or with an empty text of Triton, from the first suspicion to its end.

        A slow model or a full queue is not a hung model: requests whose callers have left count too. If no other model
        answers this method either, Triton is stuck, and only a restart can help. Triton is not restarted soon after the
        last time, nor if the gateway did not start it: then `/health/triton` shows that a restart is needed.
        """
        health, state, began = self.health, self.health.models[model], time.monotonic()
        of_triton, may_reload, since = health.calls_of("", method), bool(model), began
        subject = f"model '{model}'" if model else "Triton"
        try:
            if model:
                if not await self._stays_silent(model, method, began):
                    return
                health.begin(ModelFault.HUNG, model)
                if not health.is_heard_since(began, method):
                    of_triton.unanswered = FAILURES
            while await self._stays_silent(model, method, since + self._hung_after_s(method, model)):
                if model and of_triton.unanswered:  # its examination decides first
                    continue
                _log.error("%s hangs: it has completed no request for %g s", subject, round(time.monotonic() - began))
                if may_reload and health.may_reload:
                    may_reload = False
                    await self._reload_hung(model)
                else:
                    health.begin(ModelFault.STUCK, model)
                    if self.restart is not None and self._restarts.is_due:
                        self._restarts.fail()
                        _log.error("the embedded Triton is restarted, because %s hangs", subject)
                        await self.restart()
                since = time.monotonic()
            if since == began and not health.is_stuck:
                state.canary_s = max(state.canary_s, time.monotonic() - began)
        finally:
            health.calls_of(model, method).unanswered = 0
            for fault in (ModelFault.HUNG, ModelFault.STUCK):
                health.end(fault, model)

    async def _reload_hung(self, model: str) -> None:
        """Reloads the models that it runs too, without those whose own canary is answered."""
        async with self._reloading:
            with self.turn() as is_other:
                for name in () if is_other else self.health.run_by(model):
                    if name == model or not await self._is_answered(name):
                        await self._reloads(name, RELOAD_S)

    async def _stays_silent(self, model: str, method: str, until: float) -> bool:
        """Whether the model completes nothing for this time, and for as many calls as open a breaker."""
        health, rounds = self.health, 0
        while rounds < CANARIES or health.calls_of(model, method).unanswered < FAILURES or time.monotonic() < until:
            began, canaries = time.monotonic(), self._canaries_by(method, model)
            found = await asyncio.gather(*(self._is_silent(each, method) for each in canaries))
            is_explained = model and health.is_stuck
            if is_explained or not found or not all(found) or health.is_heard_since(began, method, model):
                return False
            rounds += 1
        return True

    def _hung_after_s(self, method: str, model: str = "") -> float:
        canaries, models = self._canaries_by(method, model), self.health.models
        return max(HUNG_S, *(max(models[each.request.model].canary_s, each.deadline_s) for each in canaries), 0.0)

    def _canaries_by(self, method: str, model: str = "") -> Sequence[Canary]:
        """The canaries of models that have answered before; without ``model``, several.

        Triton answers ModelStreamInfer for every model, ModelInfer only for models that are not decoupled.
        """
        found = self.canaries()
        named = (found[name] for name in found if model in {"", name} and self.health.models[name].recent_s)
        return [each for each in named if not (each.is_decoupled and method == "ModelInfer")][:_MOST_MODELS]

    async def _is_silent(self, canary: Canary, method: str) -> bool:
        """Sends the canary with the gRPC method ``method``, and distinguishes a busy model from a hung one.

        Triton executes requests although their callers have left. So a model that answers nothing in time
        may be busy for minutes. Triton's statistics count the requests that it completes in this time.

        Returns:
            False also if Triton, its statistics or the model cannot be reached.
        """
        model, is_streamed = canary.request.model, method == "ModelStreamInfer"
        timeout_s, names = self.health.models[model].canary_s, self.health.run_by(model)
        try:
            before = [await self._completed(name) for name in names]
            if await is_answered(self.engine, replace(canary, is_decoupled=is_streamed), timeout_s) is not False:
                return False
            after = [await self._completed(name) for name in names]
        except GatewayError:
            return False
        # The canary itself counts as an execution of an ensemble's steps and, before its response, of a decoupled
        # model. So these are busy only if the completed requests took about as long as the canary waited.
        if not is_streamed and after[-1][0] != before[-1][0]:
            return False
        gained = [(now[1] - then[1], now[2] - then[2]) for now, then in zip(after, before, strict=True)]
        return sum(ns / requests / 1e9 for requests, ns in gained if requests > 0) < timeout_s / 2

    async def _completed(self, model: str) -> tuple[int, int, int, int]:
        """The model's executions since its load, successful requests, their nanoseconds in Triton, and failures."""
        versions = (await self.engine.document("stats", model))["model_stats"]
        succeeded, failed = ([each["inference_stats"][end] for each in versions] for end in ("success", "fail"))
        executions = sum(each["execution_count"] for each in versions)
        requests, failures = (sum(each["count"] for each in ended) for ended in (succeeded, failed))
        return executions, requests, sum(each["ns"] for each in succeeded), failures

    # Lost streams. Triton 2.51 does not end a stream whose model process died, not even when the model is loaded again.
    # And a connection to a host that is gone stays open for a long time.

    def _is_silent_stream(self, stream: RunningStream) -> bool:
        """Ends the stream of a process that has ended; otherwise returns whether to find out why the stream is silent.

        Another instance of the model may be alive, and a reload waits for its streams: then the stream gets more time.
        """
        health, silent_s = self.health, stream.silent_s
        if silent_s < DEAD_S:
            return False
        is_dead = not DEAD.isdisjoint(health.faults_of(stream.model)) and health.instances(stream.model) == 1
        ends_s = DEAD_S if is_dead else health.models[stream.model].canary_s
        if silent_s >= ends_s and health.has_ended_since(stream.began, stream.model):
            text = "The process of the model ended before the stream was complete."
            stream.call.interrupt(ModelNotReady(text, retry_after_s=REPAIR_S))
            return False
        if silent_s < self._limit_s(stream) or stream.examined_s <= silent_s < 2 * stream.examined_s:
            return False
        stream.examined_s = silent_s
        return True

    def _limit_s(self, stream: RunningStream) -> float:
        """The silence after which a stream is examined."""
        state = self.health.models[stream.model]
        return state.canary_s if stream.call.arrived is None else min(state.canary_s, 2 * state.timeout_s)

    async def _examine_streams(self, model: str) -> None:
        """Ends silent streams if Triton does not answer. Otherwise a canary may meet a dead process."""
        asked_at = time.monotonic()
        if await self.engine.answers():
            await self._is_answered(model)
            return
        for stream in list(self.engine.streams):
            if stream.silent_s - (time.monotonic() - asked_at) >= self._limit_s(stream):
                stream.call.interrupt(UpstreamUnavailable("Triton stopped answering before the stream was complete."))

    async def _count(self) -> None:
        """Detects models that any client of Triton has reloaded: their statistics begin again at 0."""
        for model in {name for stream in self.engine.streams for name in self.health.run_by(stream.model)}:
            now, state = time.monotonic(), self.health.models[model]
            with suppress(GatewayError):
                _, requests, _, failures = await self._completed(model)
                counted_at, counted = self._counts.get(model, (0.0, 0))
                if (count := requests + failures) < counted:
                    state.ended_at = max(state.ended_at, counted_at)
                self._counts[model] = now, count


async def is_answered(engine: Engine, canary: Canary, timeout_s: float) -> bool | None:
    """Waits for the first response. An error of the model is an answer. None if the model or Triton is unavailable."""
    deadline = Deadline.after(timeout_s)
    try:
        async with aclosing(responses_of(engine, [canary.request], deadline, decoupled=canary.is_decoupled)) as found:
            await anext(found, None)
    except GatewayError as exc:
        return None if isinstance(exc, Unavailable) else not isinstance(exc, DeadlineExceeded)
    return True
