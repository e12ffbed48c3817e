"""Runs a stream: numbers its events, and writes exactly one terminal event, as the last one."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from app.core.aio import IdleTimeout
from app.core.answer import Answer
from app.core.errors import DeadlineExceeded, GatewayError, Internal, Outcome, SlowConsumer, StreamCancelled
from app.core.inference import Deadline, InferenceResponse
from app.core.json import is_large, json_in_turns, json_of
from app.streams.events import Event, EventLog, EventName, LiveLog

_log = logging.getLogger(__name__)


class Done(TypedDict):
    """The data of the event `done`."""

    reason: Literal["complete", "early_exit"]
    early_exit: str | Sequence[str | None] | None
    outputs: Annotated[int, Meta(ge=0)]
    request_id: str


ProblemOf = Callable[[GatewayError, str], Mapping[str, Any]]
"""Maps an error and the request's id to the problem object of the terminal event."""

_ABANDONED = frozenset(
    {Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.REJECTED, Outcome.CONTRACT_VIOLATION, Outcome.INTERNAL}
)
"""Outcomes that the gateway decides while the model may still be computing."""


@dataclass(kw_only=True, eq=False)
class Stream(ABC):
    """Runs as a separate task after :meth:`start`. Its events are in ``log``. A subclass is told what happens to it.

    ``first_s``: longest time until the model's first response, in seconds. ``progress_s``: longest time between two
    later responses. ``lag_s``: longest time for which Triton keeps responses because the reader is slower than the
    model. ``on_response``: called for each response of the model, before its output is written.
    """

    request_id: str
    responses: AsyncGenerator[InferenceResponse]
    answer: Answer
    deadline: Deadline
    first_s: float
    progress_s: float
    lag_s: float
    problem_of: ProblemOf
    on_response: Callable[[], None]
    log: EventLog = field(default_factory=LiveLog)
    outcome: Outcome | None = field(default=None, init=False)
    early_exit: str | None = field(default=None, init=False)
    outputs: int = field(default=0, init=False)
    error: GatewayError | None = field(default=None, init=False)
    own_s: float = field(default=0.0, init=False)
    """Seconds spent in the gateway for the responses, outside Triton."""
    _last_id: int = field(default=0, init=False)
    _cause: GatewayError | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _lag_s: float = field(default=0.0, init=False)
    """Seconds of waiting for the reader since Triton last kept no response for it."""

    @abstractmethod
    def on_output(self) -> None:
        """Called after each output was written."""

    @abstractmethod
    def on_abandoned(self) -> None:
        """Called when the gateway needs no further response, but the model may still be computing."""

    @abstractmethod
    def on_end(self) -> None:
        """Called once, after the terminal event was written."""

    def start(self) -> asyncio.Task[None]:
        """Starts the task, which ends after it has written the terminal event."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._settle)
        return self._task

    def _settle(self, _task: asyncio.Task[None]) -> None:
        """Writes the terminal event if the task was cancelled before its first step, outside its ``try``."""
        if self.outcome is None:
            self._end_with(self._cause or StreamCancelled("The gateway cancelled the stream."))

    def end(self, cause: GatewayError) -> None:
        """Stops the work; the terminal event has the reason. A no-op for a stream that has ended."""
        if self._task is None or self._cause is not None or self._task.done():
            return
        self._cause = cause
        self._task.cancel()

    async def ended(self) -> None:
        """Waits until the terminal event is written."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Writes every response as an output, and then the terminal event."""
        answer, silence = self.answer, IdleTimeout(self.first_s)
        try:
            try:
                async with silence, aclosing(self.responses) as responses:
                    async for response in responses:
                        self.on_response()
                        started = time.perf_counter()
                        values = answer.add(response)
                        if values is not None:
                            # No name holds the text: it would stay in memory until the next response.
                            self._append(
                                "output", b"".join(await json_in_turns(values)) if is_large(values) else json_of(values)
                            )
                        self.own_s += time.perf_counter() - started
                        if self._lag_s and not response.is_behind:
                            self._lag_s = 0.0
                        has_enough = answer.has_enough
                        if has_enough and not response.is_final:
                            self.on_abandoned()
                        del response, values  # otherwise they stay in memory until the next response
                        if has_enough:
                            break
                        if self.log.is_full:
                            silence.pause()
                            await self._wait_for_reader()
                        if silence.idle_s != self.progress_s:
                            silence.change(self.progress_s)
                        silence.renew()
            except TimeoutError as exc:
                raise DeadlineExceeded(f"The model was silent for {silence.idle_s:g} s.") from exc
            await self._finish()
        except GatewayError as exc:
            await self._finish(exc)
        except asyncio.CancelledError:
            self._end_with(self._cause or StreamCancelled("The gateway cancelled the stream."))
        except Exception:
            _log.exception("a stream failed")
            self._end_with(Internal("The gateway failed. Its log shows the cause under the request's id."))

    async def _wait_for_reader(self) -> None:
        """Waits while Triton buffers the model's responses. :meth:`end` and the deadline interrupt the wait."""
        if self._lag_s > self.lag_s:
            raise SlowConsumer(f"The client was too slow: Triton kept outputs for {self.lag_s:g} s.")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.deadline.remaining_s()):
                await self.log.room()
        except TimeoutError as exc:
            raise DeadlineExceeded("The deadline passed while the client was reading.") from exc
        self._lag_s += time.monotonic() - began

    async def _finish(self, error: GatewayError | None = None) -> None:
        try:
            ending = await self.answer.end(error)
            for values in ending.outputs:
                self._append("output", json_of(values))
        except GatewayError as exc:
            self._end_with(exc)
            return
        early_exit = self.early_exit = ending.early_exit
        self.outcome = Outcome.OK if early_exit is None else Outcome.EARLY_EXIT
        done: Done = {
            "reason": "complete" if early_exit is None else "early_exit",
            "early_exit": ending.shown_exit,
            "outputs": self.outputs,
            "request_id": self.request_id,
        }
        self._append("done", json_of(done))
        self.on_end()

    def _end_with(self, error: GatewayError) -> None:
        error.forget_frames()
        self.error, self.outcome = error, error.outcome
        if error.outcome in _ABANDONED:
            self.on_abandoned()
        self._append("error", json_of(self.problem_of(error, self.request_id)))
        self.on_end()

    def _append(self, name: EventName, text: bytes) -> None:
        # A copy, because orjson's result keeps eight times its length in memory.
        event = Event(self._last_id + 1, name, bytes(memoryview(text)))
        self.log.append(event)
        self._last_id = event.id
        if name == "output":
            self.outputs += 1
            self.on_output()
