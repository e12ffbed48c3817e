"""One step of a session as a stream. Its caller may leave; the step runs to its end."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from app.api.inference import Inference, InferenceCall
from app.api.problems import problem_of
from app.core.answer import Ending
from app.core.errors import ClientClosedRequest, DeadlineExceeded, GatewayError
from app.core.inference import Deadline, InferenceRequest
from app.core.json import json_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector
from app.sessions.session import PipelineSession, SessionStep, StepAnswer, Subject
from app.streams.events import Event, LiveLog


class LeavableLog(LiveLog):
    """Drops all events after :meth:`end`."""

    def __init__(self) -> None:
        super().__init__()
        self._last_id = 0
        self.has_ended = False

    @property
    def is_full(self) -> bool:
        return not self.has_ended and super().is_full

    def append(self, event: Event) -> None:
        if not self.has_ended:
            self._last_id, self.has_ended = event.id, event.is_terminal
            super().append(event)

    def end(self, problem: bytes) -> None:
        """Adds the terminal event ``error`` for a reader that leaves. No-op after another terminal event."""
        self.append(Event(self._last_id + 1, "error", problem))


class StepCollector(Collector):
    """The answer of a streamed step."""

    def __init__(self, pipeline: Pipeline, request: InferenceRequest, session: PipelineSession[Subject]) -> None:
        super().__init__(pipeline, request)
        self._session = session

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises SessionLost, and the errors of :meth:`Collector.finish`."""
        return super().finish(None if error is None else self._session.error_of_stream(error))


class StepStream:
    """``call``: has the deadline of the caller. The step may run for as long as Triton knows the sequence."""

    def __init__(self, inference: Inference, session: PipelineSession[Subject], call: InferenceCall) -> None:
        self._inference = inference
        self._session = session
        self._call = call
        self._record = call.record
        self._opening: Sequence[Event] = ()
        self._begun = asyncio.get_running_loop().create_future()
        self.log = LeavableLog()
        self.number = 0
        """Of the step, when it has begun."""

    async def open(self, number: int | None, *, is_last: bool) -> Sequence[Event]:
        """Returns the first events; none if the model is silent for ``commit_s``.

        Raises the errors of :meth:`PipelineSession.begin`.
        """
        try:
            await self._session.begin(SessionStep(number, is_last, self._call.deadline, self._run), self._begun)
        except BaseException:
            self.log.end(b"{}")  # nobody reads it
            raise
        return self._opening

    def leave(self, cause: GatewayError) -> None:
        """Ends the events with an error; the step goes on. No-op if the events have ended."""
        if not self.log.has_ended:
            self._record.fail(cause)
            self.log.end(json_of(problem_of(cause, self._record.request_id)))

    async def left(self) -> None:
        """Call it when nobody reads the events any more."""
        self.leave(ClientClosedRequest("The client left before the end of the step."))

    async def _run(self) -> StepAnswer:
        """Returns when the model has sent its last response."""
        self.number = self._session.steps + 1
        call = replace(self._call, deadline=Deadline.after(self._session.terms.triton_idle_s))
        stream, self._opening = await self._inference.open_stream(call, self.log)
        late = DeadlineExceeded("The deadline passed. The step runs to its end, and its outputs are dropped.")
        timer = asyncio.get_running_loop().call_later(self._call.deadline.remaining_s(), self.leave, late)
        self._begun.set_result(None)
        try:
            await stream.ended()
        finally:
            timer.cancel()
        if stream.error is not None:
            raise stream.error
        return StepAnswer(b"", stream.early_exit)
