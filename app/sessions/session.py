"""One session: its steps run in order, one at a time, and a repeated step gets the answer of the first.

A step that was sent runs to its end, whether its caller waits or not: Triton cannot take a request back out of a
sequence without leaving the state unknown (decision 11).
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from time import monotonic
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app.admission.admission import PipelineAdmission
from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Rejected,
    SessionLost,
    StepOutOfTurn,
    Unavailable,
    UnknownSession,
)
from app.core.inference import Deadline, InferenceRequest, OpenSequence, Parameter
from app.pipelines.pipeline import Pipeline
from app.pipelines.sessions import SessionTerms
from app.sessions.places import Place

MOST_WAITING = 8
"""Steps of one session that may wait for their turn."""
LARGEST_KEPT_BYTES = 1024 * 1024
"""A larger answer is not kept for a repeated step."""


class End(StrEnum):
    """Why a session ended."""

    LAST_STEP = "last_step"
    DELETED = "deleted"
    IDLE = "idle"
    MAX = "max"
    LOST = "lost"
    DRAINING = "draining"


class StepAnswer(Struct, frozen=True):
    """``body``: as it is sent to the caller."""

    body: bytes
    early_exit: str | None = None


class SessionStep(Struct, frozen=True):
    """``number``: as the caller counts; None if it does not. ``run``: takes a slot, and calls the model."""

    number: int | None
    is_last: bool
    deadline: Deadline
    run: Callable[[], Awaitable[StepAnswer]]


class StepOutcome(Struct, frozen=True):
    """How a step ended. Exactly one of both is set."""

    answer: StepAnswer | None = None
    error: GatewayError | None = None

    @property
    def size(self) -> int:
        return 0 if self.answer is None else len(self.answer.body)

    def result(self) -> StepAnswer:
        """Raises the error."""
        if self.answer is None:
            assert self.error is not None
            raise self.error
        return self.answer


class AnswerMemory:
    """Limits the bytes of the kept answers of all sessions."""

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        self._limit = limit
        self.used = 0

    def replace(self, old: int, new: int) -> bool:
        """Gives ``old`` bytes back and takes ``new`` bytes. Returns whether they fit."""
        self.used -= old
        fits = new <= LARGEST_KEPT_BYTES and self.used + new <= self._limit
        self.used += new if fits else 0
        return fits


@dataclass(eq=False, slots=True)
class PipelineSession:
    """``pipeline``: as it was when the session was opened. ``on_end``: is called once when the session ends."""

    id: str
    """A bearer capability. Never log it."""
    owner: str
    """The id of the API key that opened it; empty without one."""
    pipeline: Pipeline
    admission: PipelineAdmission
    sequence_id: int | str
    place: Place
    on_end: "Callable[[PipelineSession, End], None]"
    memory: AnswerMemory
    on_expired: Callable[[], None] | None = field(default=None, init=False)
    """Called when the session ends because no step came in time."""
    terms: SessionTerms = field(init=False)
    sequence: OpenSequence = field(init=False)
    opened_at: float = field(init=False)
    queued_at: float | None = field(default=None, init=False)
    """When the last step was sent; None if Triton does not know the sequence."""
    steps: int = field(default=0, init=False)
    """The number of the last answered step."""
    ended: End | None = field(default=None, init=False)
    has_end_flag: bool = field(default=False, init=False)
    """Whether Triton got the end flag."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: int = field(default=0, init=False)
    _current: SessionStep | None = field(default=None, init=False)
    _is_sent: bool = field(default=False, init=False)
    """Whether the running step, or the last one, was sent."""
    _is_cut_off: bool = field(default=False, init=False)
    """Whether the last step could not be sent, so that Triton may have lost the state."""
    _expires_at: float = field(default=inf, init=False)
    """When the session ends if its next step has not come, in monotonic seconds. Set while no step runs."""
    _kept: StepOutcome | None = field(default=None, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _timer_at: float = field(default=inf, init=False)
    """When the timer fires. By then steps may have come, so that it is set again: most steps do not touch it."""

    def __post_init__(self) -> None:
        assert self.pipeline.session is not None
        self.terms = self.pipeline.session
        self.sequence = OpenSequence(self.place.address)
        self.opened_at = monotonic()
        self._await_step()

    @property
    def expires_in_s(self) -> float:
        """How long the session waits for its next step."""
        return max(self._expires_at - monotonic(), 0.0)

    async def step(self, step: SessionStep) -> StepAnswer:
        """Waits for the turn of the step, and runs it.

        Raises StepOutOfTurn, SessionLost, UnknownSession, DeadlineExceeded, and the errors of ``step.run``.
        """
        outcome = await self._take_turn(step) or await self._outcome(step)
        if outcome is None:
            hint = "The step goes on. Send it again with the same X-Session-Step to get its answer."
            raise DeadlineExceeded("The step was not answered before the deadline.", hint=hint)
        return outcome.result()

    async def begin(self, step: SessionStep, begun: asyncio.Future[None]) -> None:
        """Waits for the turn of a step whose answer is a stream, runs it, and returns when ``begun`` is done.

        The answer is not kept. Raises StepOutOfTurn for a repeated step; the other errors are those of :meth:`step`.
        """
        if await self._take_turn(step) is not None:
            raise StepOutOfTurn("This step was answered, but not as a stream.", last_step=self.steps)
        outcome = await self._outcome(step, begun)
        if begun.done():
            return
        if outcome is None:
            hint = "If the step was sent to Triton, it runs to its end, and its outputs are dropped."
            raise DeadlineExceeded("The step had no output before the deadline.", hint=hint)
        outcome.result()

    def error_of_stream(self, error: GatewayError) -> GatewayError:
        """The error that ends the stream of a step: SessionLost if the state is lost."""
        is_sent = not isinstance(error, Unavailable) or error.was_sent
        return self._lost() if self.sequence.is_lost and is_sent else error

    def prepared(self, request: InferenceRequest) -> InferenceRequest:
        """Returns the request as the running step of the sequence. Call it when the request is sent.

        The start flag is repeated only if Triton did not take the first step: a model that failed has a state, too.
        """
        assert self._current is not None
        self.queued_at = monotonic()
        self._is_sent = True
        return self.in_sequence(request, starts=not self.steps, ends=self._current.is_last)

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
            if not self._turn.locked():
                self._disarm()
            self.on_end(self, reason)

    async def settle(self) -> None:
        """Waits until no step runs. Call it after the session has ended."""
        async with self._turn:
            pass

    def forget(self) -> None:
        """Frees the kept answer."""
        if self._kept is not None:
            self.memory.replace(self._kept.size, 0)
            self._kept = None

    async def _take_turn(self, step: SessionStep) -> StepOutcome | None:
        """Returns the outcome of a repeated step; None if the step has its turn now. Raises the errors of a turn."""
        if self._waiting >= MOST_WAITING:
            raise StepOutOfTurn(f"{MOST_WAITING} steps of this session wait already.", last_step=self.steps)
        if not self._waiting and not self._turn.locked():
            await self._turn.acquire()  # at once
        else:
            self._waiting += 1
            try:
                async with asyncio.timeout(step.deadline.remaining_s()):
                    await self._turn.acquire()
            except TimeoutError as exc:
                raise DeadlineExceeded("The deadline passed while an earlier step of the session ran.") from exc
            finally:
                self._waiting -= 1
        has_turn = False
        try:
            kept = self._repeated(step.number)
            has_turn = kept is None
        finally:
            if not has_turn:
                self._turn.release()
        return kept

    def _repeated(self, number: int | None) -> StepOutcome | None:
        """Returns the outcome of a repeated step; None if the step is the next one. Raises the other cases."""
        if number is not None and number == self.steps and self._kept is not None:
            return self._kept
        if self.ended is End.LOST:
            raise self._lost()
        if self.ended is not None:
            raise UnknownSession("The session has ended.")
        if number == self.steps:
            raise StepOutOfTurn("The answer of this step is not kept.", last_step=self.steps)
        if number is not None and number != self.steps + 1:
            raise StepOutOfTurn(f"The next step of this session is {self.steps + 1}.", last_step=self.steps)
        return None

    async def _outcome(self, step: SessionStep, begun: asyncio.Future[None] | None = None) -> StepOutcome | None:
        """Runs a step that has its turn, in a task, because it may run longer than its caller waits.

        None: the step has begun, or the deadline has passed. A step that was not sent yet is cancelled when its caller
        stops waiting.
        """
        self._is_sent = False
        running = asyncio.create_task(self._run(step, keeps=begun is None))
        running.add_done_callback(self._end_turn)
        waiting: list[asyncio.Future[Any]] = [running] if begun is None else [running, begun]
        try:
            await asyncio.wait(waiting, timeout=step.deadline.remaining_s(), return_when=FIRST_COMPLETED)
        finally:
            if not self._is_sent and not running.done():
                running.cancel()
        return running.result() if running.done() and (begun is None or not begun.done()) else None

    def _end_turn(self, _running: asyncio.Task[StepOutcome]) -> None:
        self._turn.release()
        self._await_step()

    async def _run(self, step: SessionStep, *, keeps: bool) -> StepOutcome:
        self._current = step
        queued_before = self.queued_at
        try:
            try:
                outcome = StepOutcome(await step.run())
            except GatewayError as exc:
                exc.forget_frames()  # they hold the request's body
                outcome = StepOutcome(error=exc)
            self._is_cut_off = isinstance(outcome.error, Unavailable) and not outcome.error.was_sent
            if self._is_cut_off:  # without an earlier step there is no sequence that can be lost
                self.queued_at = queued_before
                self.sequence.is_lost &= queued_before is not None
            if self._is_sent and not self.sequence.is_lost and not isinstance(outcome.error, Rejected | Unavailable):
                self._answered(step, outcome, keeps=keeps)
        except BaseException:
            self.sequence.is_lost |= self._is_sent  # the call was interrupted
            raise
        finally:
            self._current = None
            if self.sequence.is_lost:
                self.close(End.LOST)
        return StepOutcome(error=self._lost()) if self.sequence.is_lost else outcome

    def _answered(self, step: SessionStep, outcome: StepOutcome, *, keeps: bool) -> None:
        """An error of the model is an answer too: the model ran."""
        self.steps += 1
        self.forget()
        if keeps and step.number is not None and self.memory.replace(0, outcome.size):
            self._kept = outcome
        if step.is_last:
            self.has_end_flag = outcome.error is None
            self.close(End.LAST_STEP)

    def _lost(self) -> SessionLost:
        return SessionLost(
            f"The state of the session is lost. The last answered step is {self.steps}.",
            last_step=self.steps,
            hint="Open a new session, and begin again with its first step.",
        )

    def _await_step(self) -> None:
        """Begins to wait for the next step."""
        expires_at = min(monotonic() + self.terms.idle_s, self.opened_at + self.terms.max_s)
        if self.queued_at is not None:
            expires_at = min(expires_at, self.queued_at + self.terms.reach_s)
        self._expires_at = expires_at
        if self.ended is None:
            self._arm(expires_at)
        else:
            self._disarm()

    def _arm(self, at: float) -> None:
        """Sets the timer, unless it fires early enough."""
        if at < self._timer_at:
            self._disarm()
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_later(max(at - monotonic(), 0.0), self._time_out)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, inf

    def _time_out(self) -> None:
        """Ends the session if it is time. The end of a running step sets the timer again."""
        self._timer_at = inf
        if self._turn.locked() or self.ended is not None:
            return
        if self.expires_in_s > 0:
            self._arm(self._expires_at)
            return
        is_old = self._expires_at >= self.opened_at + self.terms.max_s
        if self._is_cut_off and self.queued_at is not None:
            self.close(End.LOST)
        else:
            self.close(End.MAX if is_old else End.IDLE)
        if self.on_expired is not None:
            self.on_expired()
