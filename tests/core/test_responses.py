"""The responses of one request: those of a step of a sequence are read to their end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from app.core.engine import Engine, responses_of
from app.core.errors import ModelError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, OpenSequence


class Sending(Engine):
    """Sends four responses. ``error``: raised instead of the last one. ``silence``: waits for ever before the last."""

    def __init__(self, *, error: ModelError | None = None, is_silent: bool = False) -> None:
        self.sent = 0
        self.error = error
        self.is_silent = is_silent

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        for number in range(4):
            if number == 3 and self.error is not None:
                raise self.error
            if number == 3 and self.is_silent:
                await asyncio.Event().wait()
            self.sent += 1
            yield InferenceResponse({}, is_final=number == 3)


async def read(engine: Sending, count: int, sequence: OpenSequence | None) -> None:
    request = InferenceRequest("m", (), extensions=() if sequence is None else (sequence,))
    async with aclosing(responses_of(engine, [request], Deadline.after(10), decoupled=True)) as responses:
        for _ in range(count):
            await anext(responses)


@pytest.mark.parametrize(("sequence", "sent"), [(None, 2), (OpenSequence(), 4)])
async def test_a_step_that_is_closed_early_is_read_to_its_end(sequence: OpenSequence | None, sent: int) -> None:
    engine = Sending()
    await read(engine, 2, sequence)
    assert engine.sent == sent
    assert sequence is None or not sequence.is_lost


async def test_an_error_at_the_end_of_a_closed_step_is_raised() -> None:
    with pytest.raises(ModelError):
        await read(Sending(error=ModelError("failed")), 2, OpenSequence())


@pytest.mark.parametrize("count", [2, 4], ids=["closed early", "read"])
async def test_a_step_that_is_cancelled_loses_its_sequence(count: int) -> None:
    sequence = OpenSequence()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await read(Sending(is_silent=True), count, sequence)
    assert sequence.is_lost
