"""A started stream over the fake engine, with a record of all its notifications."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from app.core import answer
from app.core.answer import Ending
from app.core.errors import GatewayError, ModelError
from app.core.inference import Deadline, InferenceResponse
from app.streams.store import Reader, StreamStore
from app.streams.stream import Event, EventLog, LiveLog, ReplayLog, Stream
from tests.toolkit.engine import Answer, FakeEngine
from tests.toolkit.models import response, tensor

FINAL = InferenceResponse({}, is_final=True)
EXIT = ModelError("left early")


def token(value: int) -> InferenceResponse:
    return response(tensor("T", "INT32", [value]), is_final=False)


@dataclass
class FakeAnswer(answer.Answer):
    """Returns the numbers of each response. The error ``EXIT`` is an early exit; other errors are raised again."""

    ending: Ending = field(default_factory=Ending)
    breaks: BaseException | None = None
    has_output: bool = False
    enough_at: int | None = None
    """The number that makes the answer complete."""
    has_enough: bool = False

    def add(self, given: InferenceResponse) -> dict[str, Any] | None:
        if self.breaks is not None:
            raise self.breaks
        self.has_output |= bool(given.outputs)
        self.has_enough |= any(self.enough_at in each.array for each in given.outputs.values())
        return {name: each.array for name, each in given.outputs.items()} or None

    def finish(self, error: GatewayError | None = None) -> Ending:
        if error is not None and error is not EXIT:
            raise error
        ending = self.ending if error is None else Ending("nothing")
        return Ending(ending.early_exit, [{"T": []}]) if ending.early_exit and not self.has_output else ending


class SeenStream(Stream):
    """Counts what the stream tells its subclass."""

    seen_outputs = abandonments = ends = 0

    def on_output(self) -> None:
        self.seen_outputs += 1

    def on_abandoned(self) -> None:
        self.abandonments += 1

    def on_end(self) -> None:
        self.ends += 1


@dataclass
class Life:
    """A stream and its engine."""

    stream: SeenStream
    engine: FakeEngine

    @property
    def log(self) -> EventLog:
        return self.stream.log

    async def events(self) -> list[tuple[int, str, Any]]:
        """Waits for the end of the stream and returns all events."""
        await self.stream.ended()
        await asyncio.sleep(0)
        assert self.stream.ends == 1
        return [(event.id, event.name, json.loads(event.data)) for event in await self.log.read(0)]

    async def ending(self) -> str:
        """Returns the code of the error, or the reason of ``done``. Checks the rules for every stream."""
        events = await self.events()
        assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
        assert [name for _, name, _ in events[:-1]] == ["output"] * (len(events) - 1)
        _, name, data = events[-1]
        assert name in {"done", "error"}
        assert self.stream.seen_outputs == len(events) - 1
        return str(data["reason"] if name == "done" else data["code"])


def live(*answers: Answer, answer: FakeAnswer | None = None, log: EventLog | None = None, **options: Any) -> Life:
    """Starts a stream over an engine with these answers. ``options``: of ``stream_of``."""
    engine = FakeEngine(answers=list(answers))
    responses = engine.infer_stream(None, None)  # type: ignore[arg-type]
    stream = stream_of(responses, answer or FakeAnswer(), log or ReplayLog(), **options)
    stream.start()
    return Life(stream, engine)


def stream_of(
    responses: AsyncGenerator[InferenceResponse],
    answer: answer.Answer,
    log: EventLog | None = None,
    progress_s: float = 60,
    deadline: Deadline | None = None,
    *,
    first_s: float | None = None,
    lag_s: float = 60,
) -> SeenStream:
    """``first_s``: ``progress_s`` if None."""
    return SeenStream(
        request_id="rid",
        responses=responses,
        answer=answer,
        deadline=deadline or Deadline.after(60),
        first_s=progress_s if first_s is None else first_s,
        progress_s=progress_s,
        lag_s=lag_s,
        problem_of=problem_of,
        on_response=lambda: None,
        log=log or LiveLog(),
    )


def problem_of(error: GatewayError, request_id: str) -> dict[str, Any]:
    return {"code": error.code, "detail": error.detail, "request_id": request_id}


def ids(events: list[Event]) -> list[int]:
    return [event.id for event in events]


async def opened(store: StreamStore, stream_id: str, after: int = 0, *, read: int = 0) -> Reader:
    """``read``: how many events the reader has read."""
    reader, seen = await store.reader(stream_id, after), 0
    assert reader is not None
    while seen < read:
        seen += len(await reader.read(seen))
    return reader


async def read_all(store: StreamStore, stream_id: str, after: int = 0, *, pause_s: float = 0.0) -> list[Event]:
    reader = await opened(store, stream_id, after)
    try:
        events: list[Event] = []
        while not (events and events[-1].is_terminal):
            events += await reader.read(events[-1].id if events else after)
            await asyncio.sleep(pause_s)
        return events
    finally:
        await reader.close()
