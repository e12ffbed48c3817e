"""One session: its steps run in order, one at a time, and a repeated step gets the answer of the first.

The key ``session`` of gateway.yaml, and the terms of a pipeline's sessions: the sequences that its models have.

A step that was sent runs to its end, whether its caller waits or not: Triton cannot take a request back out of a
sequence without leaving the state unknown (decision 11).
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from time import monotonic
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import Field

from app.config.document import JsonValue, Name, Seconds, Section
from app.core.answer import WholeAnswer
from app.core.engine import PipelineLayer
from app.core.errors import ClientError, DeadlineExceeded, GatewayError, Outcome, Rejected, Unavailable
from app.core.inference import BYTES, Deadline, InferenceRequest, OpenSequence, Parameter
from app.core.model import Finding, ModelConfig, OwnIds, SequenceBatching, SequenceIds, reached, sequence_ids_of

OWN_TEXT = "triton-gateway-session-"
OWN_NUMBERS = range(2**62, 2**63)
OWN_SHORT_NUMBERS = range(2**30, 2**31)
"""The sequence ids of sessions. The short ones are for models whose control has 32 bits."""
MARGIN = 0.1
LEAST_MARGIN_S, MOST_MARGIN_S = 0.1, 5.0
"""A request must be in Triton's queue this long before Triton forgets the sequence."""


class SessionSpec(Section):
    """A caller's steps are one sequence of a model with ``sequence_batching``."""

    idle_s: Seconds = 30.0
    """How long a session waits for its next step. Triton's own limit of the model may be shorter."""
    max_s: Seconds = 600.0
    """How long a session may live."""
    max_open: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The most sessions at a time. Left out: as many sequences as the models run at a time."""
    end_inputs: dict[Name, JsonValue] | None = None
    """The fields of a request with which the gateway ends the sequence of a session that has no last step."""

    def terms_of(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> "SessionTerms | str | None":
        """``models``: those that a request runs through, as far as they are known.

        A text is the reason why the models cannot have sessions. None: a step that is not known may be stateful.
        """
        ids, stateful = sequence_ids_of(config, models), stateful_models(config, models)
        if not stateful and any(step.model not in models for step in config.steps):
            return None
        if ids.made_for:
            return (
                f"model '{ids.made_for}' has `iterative_sequence`, which needs no session: each request is a sequence "
                "of its own. Remove `session`"
            )
        if not stateful:
            return "no model that a request runs through has `sequence_batching`"
        if not ids.max_number and not ids.takes_text:
            names = ", ".join(each.name for each in stateful)
            return f"the models {names} take no common form of sequence id: texts and numbers"
        idle_s = [each.sequence.idle_s for each in stateful if each.sequence is not None]
        slots = {each.name: each.sequence_slots for each in stateful}
        return SessionTerms(self, slots, ids, min(idle_s), max(idle_s))

    def findings(
        self,
        pipeline: str | None,
        config: ModelConfig,
        models: Mapping[str, ModelConfig],
        *,
        limits: Mapping[str, float],
        may_exit: bool,
    ) -> Iterator[Finding]:
        """``limits``: declared times by key. ``may_exit``: whether it exits early."""
        stateful, start = stateful_models(config, models), f"pipeline '{pipeline}': "
        for model in stateful:
            sequence = model.sequence or SequenceBatching()
            name, longest_s = f"'{model.name}'", reach_s(sequence.idle_s)
            declared = {"session.idle_s": self.idle_s, **limits}
            longer = " and ".join(f"`{key}` is {value:g} s" for key, value in declared.items() if value > longest_s)
            if longer:
                yield Finding(
                    "session-idle",
                    f"{start}{longer}, but Triton forgets a sequence of {name} {sequence.idle_s:g} s after its last "
                    f"request was queued: a step and the pause after it end after {longest_s:g} s",
                )
            if self.max_open is not None and self.max_open > model.sequence_slots:
                yield Finding(
                    "session-places",
                    f"{start}`session.max_open` is {self.max_open}, but {name} runs {model.sequence_slots} sequences "
                    "at a time: no more sessions are opened",
                )
            if not sequence.knows_starts:
                text = f"{name} has no CONTROL_SEQUENCE_START and no `state`: it cannot tell where a sequence begins"
                yield Finding("session-state", start + text)
            if sequence.id_datatype == BYTES and not sequence.candidates and model.max_batch_size > 1:
                yield Finding(
                    "session-state",
                    f"{start}{name} gets its sequence id as a text, with the direct scheduler and max_batch_size "
                    f"{model.max_batch_size}: Triton 2.51 then fails steps while another session pauses",
                )
        run = reached(config, models, by_steps=True)
        if len(stateful) > 1 and (may_exit or any(not each.steps and each not in stateful for each in run)):
            names = ", ".join(f"'{model.name}'" for model in stateful)
            yield Finding(
                "session-state",
                f"{start}a step runs the stateful models {names} and others: if a model fails or exits early between "
                "them, one has seen a step that the next one has not",
            )


def missing_fault(config: ModelConfig, models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """The finding about a model that needs a session, of a pipeline without."""
    ids = sequence_ids_of(config, models)
    if ids.needed_by:
        by = "" if ids.needed_by == config.name else f" because it runs '{ids.needed_by}'"
        yield Finding(
            "needs-session",
            f"'{config.name}' needs a session{by}: declare `session: true`, or call it under /v2 with the "
            f"parameters `sequence_id` ({ids.form}), `sequence_start` and `sequence_end`",
        )


@dataclass(frozen=True, slots=True)
class SessionTerms(PipelineLayer):
    """What is declared, and what the models have.

    ``slots``: how many sequences each model that a step runs has at a time. ``triton_idle_s`` and ``longest_idle_s``:
    the first, and every one of them, has forgotten a sequence whose last request was queued this long ago.
    """

    spec: SessionSpec
    slots: Mapping[str, int]
    ids: SequenceIds
    triton_idle_s: float
    longest_idle_s: float

    @property
    def requests(self) -> Mapping[tuple[str, ...], Mapping[str, Any]]:
        return {} if self.spec.end_inputs is None else {("session", "end_inputs"): self.spec.end_inputs}

    @property
    def reach_s(self) -> float:
        """The next step must be queued in Triton within this time after the last one."""
        return reach_s(self.triton_idle_s)


def reach_s(idle_s: float) -> float:
    """Triton's idle time without a margin."""
    return max(idle_s - min(max(idle_s * MARGIN, LEAST_MARGIN_S), MOST_MARGIN_S), idle_s / 2)


def stateful_models(config: ModelConfig, models: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """The models with sequences that get the id of a request. ``models``: those that a request runs through."""
    given_id = reached(config, models, by_steps=True)
    return [each for each in given_id if each.sequence is not None and not each.sequence.is_iterative]


def own_ids_of(ids: SequenceIds) -> OwnIds:
    """The sequence ids from which sessions of these models get theirs."""
    if ids.is_text_tensor:
        return OWN_TEXT
    return OWN_NUMBERS if ids.max_number >= OWN_NUMBERS[-1] else OWN_SHORT_NUMBERS


MOST_WAITING = 8
"""Steps of one session that may wait for their turn."""
LARGEST_KEPT_BYTES = 1024 * 1024
"""A larger answer is not kept for a repeated step."""
_LATE_HINT = "The step goes on. Send it again with the same X-Session-Step to get its answer."
_LATE_STREAM_HINT = "If the step was sent to Triton, it runs to its end, and its outputs are dropped."


class HttpSessionsOff(ClientError, title="Sessions over HTTP are off"): ...


class UnknownSession(ClientError, title="No such session"): ...


class StepOutOfTurn(ClientError, title="The step is out of turn"):
    """``last_step``: the number of the last step that was answered."""

    def __init__(self, detail: str, last_step: int = 0) -> None:
        super().__init__(detail)
        self.last_step = last_step


class SessionLost(GatewayError, title="The session's state is lost", outcome=Outcome.MODEL_ERROR):
    """``last_step``: the number of the last step that was answered."""

    def __init__(self, detail: str, last_step: int = 0, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.last_step = last_step


class End(StrEnum):
    """Why a session ended."""

    LAST_STEP = "last_step"
    DELETED = "deleted"
    IDLE = "idle"
    MAX = "max"
    LOST = "lost"
    DRAINING = "draining"


class AnswerMemory:
    """Limits the bytes of the kept answers of all sessions."""

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        self._limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Returns whether the bytes fit."""
        fits = size <= LARGEST_KEPT_BYTES and self.used + size <= self._limit
        self.used += size if fits else 0
        return fits


@dataclass(eq=False, slots=True)
class PipelineSession:
    """``on_end``: is called once, with the id of the session, when it ends. It takes no further steps then.

    Its last step may still run.
    """

    id: str
    """A bearer capability. Never log it."""
    terms: SessionTerms
    sequence_id: int | str
    sequence: OpenSequence
    memory: AnswerMemory
    on_end: Callable[[str, End], None]
    on_expired: Callable[[], None] | None = field(default=None, init=False)
    """Called when the session ends because no step came in time."""
    opened_at: float = field(default_factory=monotonic, init=False)
    queued_at: float | None = field(default=None, init=False)
    """When the last step was sent; None if Triton does not know the sequence."""
    steps: int = field(default=0, init=False)
    """The number of the last answered step."""
    ended: End | None = field(default=None, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: int = field(default=0, init=False)
    _is_last: bool = field(default=False, init=False)
    """Whether the running step is the last one."""
    _is_sent: bool = field(default=False, init=False)
    """Whether the running step, or the last one, was sent."""
    _is_cut_off: bool = field(default=False, init=False)
    """Whether the last step could not be sent, so that Triton may have lost the state."""
    _idle_since: float = field(default_factory=monotonic, init=False)
    _kept: WholeAnswer | GatewayError | None = field(default=None, init=False)

    @property
    def expires_in_s(self) -> float:
        """How long the session waits for its next step."""
        queued_at, terms = inf if self.queued_at is None else self.queued_at, self.terms
        expires_at = min(
            self._idle_since + terms.spec.idle_s, self.opened_at + terms.spec.max_s, queued_at + terms.reach_s
        )
        return max(expires_at - monotonic(), 0.0)

    def expire(self) -> None:
        """Ends the session if its next step has not come in time. Call it from time to time."""
        if self.ended is not None or self._turn.locked() or self.expires_in_s:
            return
        if self._is_cut_off and self.queued_at is not None:
            self.close(End.LOST)
        else:
            self.close(End.MAX if monotonic() >= self.opened_at + self.terms.spec.max_s else End.IDLE)
        if self.on_expired is not None:
            self.on_expired()

    async def step(
        self,
        run: Callable[[], Awaitable[WholeAnswer]],
        deadline: Deadline,
        number: int | None = None,
        *,
        is_last: bool = False,
        begun: asyncio.Future[None] | None = None,
    ) -> WholeAnswer:
        """Waits for the turn of the step, and runs it. Returns its answer; that of a stream when it has begun.

        ``run``: takes a slot, and calls the model. ``number``: as the caller counts; None if it does not. ``begun``: of
        a step whose answer is a stream, which is not kept: done with the first output.

        Raises StepOutOfTurn, SessionLost, UnknownSession, DeadlineExceeded, and the errors of ``run``.
        """
        outcome = await self._take_turn(number, deadline)
        if outcome is not None and begun is not None:
            raise StepOutOfTurn("This step was answered, but not as a stream.", self.steps)
        if outcome is None:
            self._is_sent, self._is_last = False, is_last
            kept_as = number if begun is None else None
            running = asyncio.create_task(self._run(run, kept_as))  # may run longer than its caller waits
            running.add_done_callback(self._end_turn)
            waiting: list[asyncio.Future[Any]] = [running] if begun is None else [running, begun]
            try:
                await asyncio.wait(waiting, timeout=deadline.remaining_s(), return_when=FIRST_COMPLETED)
            finally:
                if not self._is_sent and not running.done():
                    running.cancel()
            if begun is not None and begun.done():
                return WholeAnswer(b"")
            if not running.done():
                hint = _LATE_HINT if begun is None else _LATE_STREAM_HINT
                raise DeadlineExceeded("The step was not answered before the deadline.", hint=hint)
            outcome = running.result()
        if isinstance(outcome, GatewayError):
            raise outcome
        return outcome

    async def _take_turn(self, number: int | None, deadline: Deadline) -> WholeAnswer | GatewayError | None:
        """Returns the outcome of a repeated step; None if the step has its turn now. Raises the errors of a turn."""
        self.expire()
        if self._waiting >= MOST_WAITING:
            raise StepOutOfTurn(f"{MOST_WAITING} steps of this session wait already.", self.steps)
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._turn.acquire()
        except TimeoutError as exc:
            raise DeadlineExceeded("The deadline passed while an earlier step of the session ran.") from exc
        finally:
            self._waiting -= 1
        error: GatewayError | None = None
        last = self.steps
        if self._kept is None or number != last:
            if self.ended is not None:
                error = self.lost() if self.ended is End.LOST else UnknownSession("The session has ended.")
            elif number == last:
                error = StepOutOfTurn("The answer of this step is not kept.", last)
            elif number not in (None, last + 1):
                error = StepOutOfTurn(f"The next step of this session is {last + 1}.", last)
            else:
                return None
        self._turn.release()
        if error is not None:
            raise error
        return self._kept

    def _end_turn(self, _running: object) -> None:
        self._turn.release()
        self._idle_since = monotonic()

    async def _run(self, run: Callable[[], Awaitable[WholeAnswer]], number: int | None) -> WholeAnswer | GatewayError:
        """``number``: None if the answer is not kept."""
        queued_before = self.queued_at
        outcome: WholeAnswer | GatewayError
        try:
            try:
                outcome = await run()
            except GatewayError as exc:
                exc.forget_frames()  # they hold the request's body
                outcome = exc
            self._is_cut_off = isinstance(outcome, Unavailable) and not outcome.was_sent
            if self._is_cut_off:  # without an earlier step there is no sequence that can be lost
                self.queued_at = queued_before
                self.sequence.is_lost &= queued_before is not None
            if self._is_sent and not self.sequence.is_lost and not isinstance(outcome, Rejected | Unavailable):
                self.steps += 1  # an error of the model is an answer too: the model ran
                self.forget()
                if number is not None and self.memory.take(_size_of(outcome)):
                    self._kept = outcome
                if self._is_last:
                    self.sequence.is_forgotten |= isinstance(outcome, WholeAnswer)
                    self.close(End.LAST_STEP)
        except BaseException:
            self.sequence.is_lost |= self._is_sent  # the call was interrupted
            raise
        finally:
            if self.sequence.is_lost:
                self.close(End.LOST)
        return self.lost() if self.sequence.is_lost else outcome

    def prepared(self, request: InferenceRequest) -> InferenceRequest:
        """Returns the request as the running step of the sequence. Call it when the request is sent.

        The start flag is repeated only if Triton did not take the first step: a model that failed has a state, too.
        """
        self.queued_at, self._is_sent = monotonic(), True
        return self.in_sequence(request, starts=not self.steps, ends=self._is_last)

    def in_sequence(self, request: InferenceRequest, *, starts: bool = False, ends: bool = False) -> InferenceRequest:
        """Returns the request as one of the sequence: the first if it ``starts`` it, the last if it ``ends`` it."""
        flags: dict[str, Parameter] = {"sequence_start": True} if starts else {}
        if ends:
            flags["sequence_end"] = True
        parameters = {**request.parameters, "sequence_id": self.sequence_id, **flags}
        return replace(request, parameters=parameters, extensions=(*request.extensions, self.sequence))

    def end(self, cause: GatewayError) -> None:
        """Ends the session when the gateway stops."""
        self.close(End.DRAINING)

    def close(self, reason: End) -> None:
        """Ends the session. The running step runs to its end. No-op if the session has ended."""
        if self.ended is None:
            self.ended = reason
            self.on_end(self.id, reason)

    def lost(self) -> SessionLost:
        text = f"The state of the session is lost. The last answered step is {self.steps}."
        return SessionLost(text, self.steps, "Open a new session, and begin again with its first step.")

    async def settle(self) -> None:
        """Waits until no step runs. Call it after the session has ended."""
        async with self._turn:
            pass

    def forget(self) -> None:
        """Frees the kept answer."""
        self.memory.used -= _size_of(self._kept)
        self._kept = None


def _size_of(outcome: object) -> int:
    return len(outcome.body) if isinstance(outcome, WholeAnswer) else 0
