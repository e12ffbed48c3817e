"""What the calls of one Triton show about it, and what follows for requests.

A model is ready, suspect or has a :class:`ModelFault`. :mod:`app.triton.health.health_watch` acts on this table:

==================================  =====================================  ========  =================================
what calls show                     proof                                  fault     what is done until it works
==================================  =====================================  ========  =================================
5 in a row without an answer        none                                   OPEN      probe after 0.25 s, then up to 5 s
2 in a row without an answer        2 canaries without an answer, and      HUNG      after 60 s reload the model;
                                    5 such calls; nothing is completed               if that does not help, STUCK
the same by one method of gRPC,     the same for 60 s of several models    STUCK     restart Triton
no matter of which model
an error that names a dead process  an error of a canary; without one,     PROCESS   reload after 1 s, when its streams
                                    3 errors                                         have ended, then up to 60 s
an error of ``engine_errors``       the same                               ENGINE    the same, with the models below it
a stream is silent                  Triton does not answer, or a process   (none)    end the stream
                                    died or was replaced since it began
==================================  =====================================  ========  =================================
"""

import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from app.core.aio import Backoff
from app.core.errors import ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.model import ModelConfig, reached
from app.triton.grpc_errors import DEAD_PROCESS, LONGEST_MESSAGE

FAILURES = 5
"""The number of consecutive failures that opens a breaker."""
FIRST_PROBE_S = 0.25
LONGEST_PROBE_S = 5.0
"""Longest interval between probes of a model that does not answer. An unreachable model keeps the first interval."""
LEAST_TIMEOUT_S = 1.0
SILENCE_S = 5.0
"""An abandoned call counts as unanswered if it waited this long, and so does a call of a model that never answered."""
REPEATED = 3
"""The number of errors about one process that confirms its death if the model has no sample."""
FIRST_DELAY_S = 1.0
"""After the death of a process, and between two reloads of its model."""
FORGIVEN_S = 300.0
"""After this time without a repair, a model starts again with the first delay."""
ENGINE_RETRY_S = 5
"""``Retry-After`` while the engine of a model is dead. An engine loads for longer, or somebody must load it."""
_log = logging.getLogger(__name__)


class ModelFault(Enum):
    """What a fault of a model means, in the order in which the faults explain a refusal."""

    HUNG = "Model '{}' does not answer.", "%s does not answer although Triton is live: it is not ready"
    OPEN = (
        "Model '{}' failed several times in a row; it is not called until it answers a probe.",
        f"%s failed {FAILURES} times in a row without an answer: its breaker is open",
    )
    ENGINE = (
        "The engine of model '{}' has died.",
        "the engine of %s died, although Triton reports the model as ready",
        "its engine has died",
        ENGINE_RETRY_S,
    )
    PROCESS = (
        "A process that model '{}' needs has died.",
        "the Python process of %s died, and Triton does not restart it",
        "a process that it needs has died",
    )
    STUCK = "Triton is stuck: it answers no inference call.", "%s is stuck: only a restart of Triton can help"

    def __init__(self, refusal: str, began: str, clause: str = "", retry_after_s: int = 1) -> None:
        """``refusal``: of requests. ``began``: a line of the log. ``clause``: see :meth:`InferenceServer.fault`."""
        self.refusal = refusal
        self.began = began
        self.clause = clause
        self.retry_after_s = retry_after_s


DEAD = {ModelFault.ENGINE, ModelFault.PROCESS}
Fault = tuple[ModelFault, str]
"""With the model that has the fault itself; an empty text: Triton."""


class ModelDeclaration(NamedTuple):
    """What the pipelines of ``gateway.yaml`` declare about a model."""

    first_output_s: float = 0.0
    """The longest time until the first output of a pipeline that uses the model; 0 if none declares it."""
    engine_errors: Sequence[str] = ()
    """Expressions for messages of the called model that mean that its engine has died."""


@dataclass(slots=True, eq=False)
class ModelHealth:
    """What is known about one model. Times are in monotonic seconds."""

    recent_s: float = 0.0
    """The longest recent answer time: older ones count less and less. 0 before the first answer."""
    canary_s: float = field(default_factory=lambda: SILENCE_S)
    """The timeout of a canary: three times the longest answer time, and any silence of a model that was only slow."""
    failures: int = 0
    """Consecutive calls without an answer that count for the breaker."""
    probes: Backoff = field(default_factory=Backoff)
    """``longest_s`` is longer than ``first_s`` if calls reached the model, but were not answered."""
    repairs: Backoff = field(default_factory=lambda: Backoff(FIRST_DELAY_S, forgiven_s=FORGIVEN_S))
    ended_at: float = 0.0
    """Calls that began earlier may be those of a process that has died since, or was replaced by a reload."""

    @property
    def timeout_s(self) -> float:
        """The time after which a missing answer counts as a failure."""
        return max(LEAST_TIMEOUT_S, 3 * self.recent_s) if self.recent_s else SILENCE_S


@dataclass(slots=True, eq=False)
class CallHistory:
    """The latest calls of one model by one gRPC method, as :class:`app.triton.triton_engine.WatchedCall` saw them."""

    model: ModelHealth
    heard_at: float = 0.0
    unanswered: int = 0
    """Consecutive calls without an answer."""
    silent_s: float = 0.0
    """How long calls have waited since the last answer. Calls at the same time count once."""
    silent_until: float = 0.0
    """The end of the latest of these waits, in monotonic seconds."""


@dataclass(slots=True, eq=False)
class TritonHealth:
    """Collects the results of the engine's calls, and decides what the engine reports as live and ready."""

    declared: Callable[[str], ModelDeclaration] = lambda model: ModelDeclaration()
    changed: Callable[[ModelFault, str, int], None] = lambda fault, model, change: None
    """Called with 1 when a fault begins, and with -1 when it ends."""
    may_reload: bool = False
    """Whether the gateway loads models again."""
    models: defaultdict[str, ModelHealth] = field(default_factory=lambda: defaultdict(ModelHealth))
    calls: dict[tuple[str, str], CallHistory] = field(default_factory=dict)
    """By model and gRPC method."""
    faults: set[Fault] = field(default_factory=set)
    suspects: dict[str, Counter[Fault]] = field(default_factory=dict)
    """Called model -> what the errors of its calls named, and how often."""
    configs: dict[str, ModelConfig] = field(default_factory=dict)
    """What Triton reported last, by model: which models a model runs."""

    def run_by(self, model: str) -> list[str]:
        """The models that the model runs, at any depth, and itself at the end."""
        config = self.configs.get(model)
        below = () if config is None else reached(config, self.configs)
        return [*sorted(set[str]().union(*(each.calls for each in below)) - {model}), model]

    def instances(self, called: str) -> int:
        """The largest number of instances among the models that a call of ``called`` runs."""
        known = (self.configs[name] for name in self.run_by(called) if name in self.configs)
        return max((config.instance_count for config in known), default=1)

    # What follows for requests

    @property
    def is_stuck(self) -> bool:
        """Whether Triton is live, but does not answer inference calls."""
        return (ModelFault.STUCK, "") in self.faults

    def with_fault(self, *faults: ModelFault) -> list[str]:
        """The models that have one of these faults themselves."""
        return sorted({model for fault, model in self.faults if fault in faults})

    def faults_of(self, model: str) -> list[ModelFault]:
        """The faults of the model, of the models that it runs, and of Triton, in the order in which they explain.

        An open breaker concerns only the calls of its model.
        """
        if not self.faults:
            return []
        names = {*self.run_by(model), ""}
        has = {
            fault for fault, name in self.faults if name in names and (fault is not ModelFault.OPEN or name == model)
        }
        return [fault for fault in ModelFault if fault in has]

    def refusal(self, model: str) -> Unavailable | None:
        """Returns the error if requests to the model must not be sent to this Triton now, else None."""
        for fault in self.faults_of(model):
            error = UpstreamUnavailable if fault in {ModelFault.OPEN, ModelFault.STUCK} else ModelNotReady
            probe_s = self.models[model].probes.due_at - time.monotonic() if fault is ModelFault.OPEN else 0.0
            retry_after_s = max(fault.retry_after_s, math.ceil(probe_s))
            return error(fault.refusal.format(model), was_sent=False, retry_after_s=retry_after_s)
        return None

    # What calls show

    def calls_of(self, model: str, method: str) -> CallHistory:
        return self.calls.setdefault((model, method), CallHistory(self.models[model]))

    def is_heard_since(self, since: float, method: str = "", model: str = "") -> bool:
        """Whether Triton answered a call, of the given method and model. ``since``: in monotonic seconds."""
        return any(
            history.heard_at >= since
            for (name, its_method), history in self.calls.items()
            if model in {"", name} and method in {"", its_method}
        )

    def may_be_busy(self, model: str, calls: CallHistory) -> bool:
        """Whether the silence of the model is explained by the declared time until a first output."""
        return 0 < calls.silent_s < self.declared(model).first_output_s

    def failed(self, model: str, *, is_timeout: bool) -> None:
        """Opens the breaker after several calls that ended without an answer. An error of the model is an answer."""
        state = self.models[model]
        state.failures += 1
        if state.failures == FAILURES:
            state.probes = Backoff(FIRST_PROBE_S, LONGEST_PROBE_S if is_timeout else FIRST_PROBE_S)
            state.probes.fail()
            self.begin(ModelFault.OPEN, model)

    def begin(self, fault: ModelFault, model: str) -> None:
        """Only notes the time of a death if the model has the fault."""
        if fault in DEAD:
            self.models[model].ended_at = time.monotonic()
        if (fault, model) not in self.faults:
            self.faults.add((fault, model))
            self.changed(fault, model, 1)
            _log.error(fault.began, f"model '{model}'" if model else "Triton")

    def end(self, fault: ModelFault, model: str) -> None:
        """No-op if the model does not have the fault."""
        if (fault, model) in self.faults:
            self.faults.remove((fault, model))
            self.changed(fault, model, -1)
            if self.refusal(model) is None:
                _log.info("%s is called again", f"model '{model}'" if model else "Triton")

    # Dead processes and engines. Triton 2.51 does not restart such a process: the model stays ready in Triton, and
    # every request that reaches the process fails after about a second. An engine dies in a process that lives.

    def suspect(self, called: str, message: str, began: float, *, is_probe: bool = False) -> Fault | None:
        """Notes what the error of a call to the model ``called`` is about.

        Triton names a process after its model, its instance group and its instance: ``text_embed_0_0``. A pipeline
        declares which messages mean that an engine has died. The error of a canary is a proof. Another may contain text
        from a caller, so it is only a suspicion.

        ``began``: start of the call, in monotonic seconds. A call from before the end of the process is ignored,
        because its error, which may be seconds late, is about the process that a repair replaced.

        Returns:
            The dead process that the message names, if the model ``called`` runs it; or the dead engine of ``called``.
        """
        message, fault, owners = message[:LONGEST_MESSAGE], ModelFault.ENGINE, [called]
        if (found := DEAD_PROCESS.search(message)) is not None:
            fault = ModelFault.PROCESS
            if found[1] is not None:
                owners = [name for name in self.run_by(called) if f"{found[1]}_".startswith(f"{name}_")]
        elif not any(re.search(pattern, message) for pattern in self.declared(called).engine_errors):
            return None
        if not owners:
            return None
        part = fault, max(owners, key=len)
        if began >= self.models[part[1]].ended_at:
            if is_probe:
                self.begin(*part)
            else:
                self.suspects.setdefault(called, Counter())[part] += 1
        return part

    def revive(self, model: str, *, is_proven: bool = True) -> None:
        """``is_proven``: whether the model has answered a sample; otherwise the next request decides.

        One error is enough then for an engine, because it fails every request.
        """
        self.models[model].ended_at = time.monotonic()
        for called in [each for each in self.suspects if model in self.run_by(each)]:
            del self.suspects[called]
        if not is_proven and (ModelFault.ENGINE, model) in self.faults:
            self.suspects[model] = Counter({(ModelFault.ENGINE, model): REPEATED - 1})
        for fault in DEAD:
            self.end(fault, model)

    def has_ended_since(self, began: float, called: str) -> bool:
        """Whether the process of the model, or of a model that it runs, is known to have ended after ``began``."""
        return any(self.models[model].ended_at > began for model in self.run_by(called))


def needs_restart(tritons: Mapping[str, TritonHealth]) -> bool:
    """Whether every Triton is stuck, or has a model that answers only after a restart."""
    return bool(tritons) and all(health.with_fault(ModelFault.STUCK) for health in tritons.values())
