"""The values of a request and its trace (W3C Trace Context), the responses of a sequence's step, and the errors.

Large arrays are written in pieces, so that the event loop can run other work in between; the JSON is the same.
"""

import asyncio
import gc
import os
import re
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import json
from app.core.engine import Engine, responses_of
from app.core.errors import ModelError, Outcome
from app.core.inference import (
    DTYPE_BY_DATATYPE,
    FLOAT_DATATYPES,
    FLOOR_S,
    INTEGER_DATATYPES,
    Deadline,
    IdleTimeout,
    InferenceRequest,
    InferenceResponse,
    OpenSequence,
    TraceContext,
    bytes_array,
    new_request_id,
)
from app.core.json import is_large, json_in_turns, json_of
from tests.toolkit.engine import every_error
from tests.toolkit.simulated_clock import on_a_simulated_clock


def test_ids_are_32_hexadecimal_digits_and_never_repeat_in_any_thread() -> None:
    with ThreadPoolExecutor(8) as pool:
        batches = pool.map(lambda _: [new_request_id() for _ in range(500)], range(16))
    ids = [each for batch in batches for each in batch]
    assert len(set(ids)) == len(ids) == 8000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_a_forked_process_gets_other_ids() -> None:
    new_request_id()  # fills the buffer of unused ids
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(write_end, new_request_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 64).decode() != new_request_id()
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("seconds", [0.0, -5.0, 1e-9, FLOOR_S / 2])
def test_a_deadline_has_a_minimum_that_triton_can_handle(seconds: float) -> None:
    deadline = Deadline.after(seconds)
    assert not deadline.has_passed
    assert 0 < deadline.remaining_s() <= FLOOR_S


def test_a_deadline_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline.after(10)
    now = 1004.0
    assert deadline.remaining_s() == pytest.approx(6)
    now = 1010.0
    assert deadline.has_passed
    now = 1011.0
    assert deadline.remaining_s() == 0.0


def test_every_datatype_has_a_kind_and_the_size_of_its_name() -> None:
    numbers = INTEGER_DATATYPES | FLOAT_DATATYPES
    assert numbers | {"BOOL", "BYTES"} == set(DTYPE_BY_DATATYPE)
    assert all(str(DTYPE_BY_DATATYPE[each].itemsize * 8) == each.lstrip("UINTBFP") for each in numbers)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (2, 1, 1), (0, 4), (0,)])
def test_bytes_keep_their_trailing_nuls_and_their_shape(shape: tuple[int, ...]) -> None:
    values = [b"a\0", b"\0\0"] if 0 not in shape else []
    array = bytes_array(values, shape)
    assert (array.shape, array.dtype, list(array.flat)) == (shape, np.object_, values)


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXAMPLE = f"00-{TRACE}-{SPAN}-01"


def test_the_example_of_the_standard_is_parsed() -> None:
    trace = TraceContext.parse(EXAMPLE, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert trace == TraceContext(TRACE, SPAN, 1, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert trace.is_sampled
    assert trace.traceparent == EXAMPLE
    unsampled = TraceContext.parse(f"00-{TRACE}-{SPAN}-00")
    assert unsampled == TraceContext(TRACE, SPAN, 0)
    assert not unsampled.is_sampled


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "garbage",
        EXAMPLE + "\n",
        " " + EXAMPLE,
        EXAMPLE + "-",
        EXAMPLE + "-more",
        EXAMPLE.upper(),
        EXAMPLE.replace("-", ""),
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}-01-a\r\nX-Evil: 1",
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",
    ],
)
def test_an_invalid_traceparent_is_ignored(traceparent: str) -> None:
    assert TraceContext.parse(traceparent) is None


def test_a_future_traceparent_is_downgraded_to_version_00() -> None:
    trace = TraceContext.parse(f"cc-{TRACE}-{SPAN}-f9-what-the-future-will-be-like")
    assert trace.traceparent == EXAMPLE


@pytest.mark.parametrize(
    ("tracestate", "kept"),
    [
        ("", ""),
        ("a=1 , b=2,\tc=3", "a=1,b=2,c=3"),
        ("tenant@system=x", "tenant@system=x"),
        ("a=1,,b=2", "a=1,b=2"),
        ("A=1", ""),
        ("a", ""),
        ("a=1\r\nx: y", ""),
        ("a=b=c", ""),
        ("a=\u00e4", ""),
        (",".join(f"k{number}=v" for number in range(33)), ""),
        ("a=" + "x" * 520, ""),
    ],
)
def test_an_invalid_tracestate_is_dropped_alone(tracestate: str, kept: str) -> None:
    trace = TraceContext.parse(EXAMPLE, tracestate)
    assert trace.state == kept


@given(st.binary(min_size=1, max_size=1), st.binary(min_size=1, max_size=1), st.text(max_size=8), st.text(max_size=40))
def test_any_parsed_traceparent_is_valid_when_passed_on(version: bytes, flags: bytes, rest: str, state: str) -> None:
    trace = TraceContext.parse(f"{version.hex()}-{TRACE}-{SPAN}-{flags.hex()}{rest}", state)
    if trace is not None:
        assert TraceContext.parse(trace.traceparent, trace.state) == trace
        assert (trace.traceparent + trace.state).isprintable()


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


def test_every_error_has_a_code_of_its_own_a_title_and_an_outcome() -> None:
    """Rejections that are temporary also have a time for the next attempt."""
    assert len({error.code for error in every_error()}) == len(every_error())
    for error in every_error():
        assert re.fullmatch(r"[a-z_]+", error.code)
        assert error.title
        assert error.outcome in Outcome
        if error.outcome in {Outcome.REJECTED, Outcome.UNAVAILABLE}:
            assert error.retryable
            assert error.retry_after_s is not None


def test_forget_frames_frees_the_frames_of_the_error_and_of_its_causes() -> None:
    class Call:
        """Keeps its error, as a call to Triton does."""

        def __init__(self) -> None:
            self.error = ValueError("from Triton")

        def response(self, _body: bytes) -> None:
            raise self.error

    def failed(call: Call) -> ModelError:
        try:
            try:
                call.response(b"large")
            except ValueError as exc:
                raise ModelError("failed") from exc
        except ModelError as exc:
            return exc

    call = Call()
    freed = weakref.ref(call)
    gc.disable()
    try:
        error = failed(call)
        del call
        assert freed() is not None
        error.forget_frames()
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("idle_s", "steps", "ends_s"),
    [
        (0.25, [0.125, IdleTimeout.renew] * 6, None),
        (0.25, [0.125, IdleTimeout.renew, 20.0], 0.375),
        (0.25, [IdleTimeout.pause, 0.5, IdleTimeout.renew, 20.0], 0.75),
        (3600.0, [partial(IdleTimeout.change, idle_s=0.25), IdleTimeout.renew, 20.0], 0.25),
        (0.25, [partial(IdleTimeout.change, idle_s=0.5), IdleTimeout.renew, 20.0], 0.5),
        (0.25, [], None),
    ],
    ids=[
        "each renewal restarts it",
        "once renewed",
        "a pause is not idle",
        "a shorter time",
        "a longer time",
        "no work",
    ],
)
@on_a_simulated_clock
async def test_an_idle_block_ends_after_its_time(
    idle_s: float, steps: list[float | Callable[[IdleTimeout], None]], ends_s: float | None
) -> None:
    """``steps``: pauses in seconds, which the clock counts exactly, and calls. ``ends_s``: when a timeout ends them."""
    loop, ended_s = asyncio.get_running_loop(), None
    began = loop.time()
    try:
        async with IdleTimeout(idle_s) as idle:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    step(idle)
    except TimeoutError:
        ended_s = loop.time() - began
    await asyncio.sleep(1.0)
    assert ended_s == ends_s


async def test_a_cancellation_takes_precedence_over_the_timeout() -> None:
    async def wait() -> None:
        async with IdleTimeout(0.01):
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.sleep(20)

    task = asyncio.create_task(wait())
    with pytest.raises(asyncio.CancelledError):
        await task


DTYPES = ["bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "float64"]
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Arrays of any shape and datatype, including extreme values, NaN and infinity."""
    shape, dtype = draw(shapes), np.dtype(draw(st.sampled_from(DTYPES)))
    size = int(np.prod(shape))
    content = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if dtype.kind == "b":
        return np.frombuffer(content, np.uint8).reshape(shape) > 127
    return np.frombuffer(content, dtype).reshape(shape)


others = st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3) | arrays(), max_size=9) | st.floats()


@given(st.dictionaries(st.text(max_size=5), arrays() | others, min_size=1, max_size=4), st.integers(1, 7))
def test_the_pieces_add_up_to_the_json_of_one_write(values: dict[str, Any], at_once: int) -> None:
    limits = {"NUMBERS_AT_ONCE": at_once, "ITEMS_AT_ONCE": at_once, "PART_BYTES": 10 * at_once}
    with patch.multiple(json, **limits):
        assert b"".join(asyncio.run(json_in_turns(values))) == json_of(values)


def test_floats_are_written_with_the_digits_of_their_datatype() -> None:
    array = np.full(10_000, 0.1, np.float32)
    assert json_of({"y": array}).count(b"0.1,") == 9_999


async def test_other_work_runs_between_the_pieces_of_a_large_array() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    parts = await json_in_turns({"y": np.zeros((1, 100_000), np.float32)})
    working.cancel()
    assert turns >= 100_000 // json.NUMBERS_AT_ONCE
    assert orjson.loads(b"".join(parts)) == {"y": [[0.0] * 100_000]}


@pytest.mark.parametrize(
    ("value", "is_written_in_turns"),
    [
        (np.zeros(9_000), True),
        (np.zeros((1, 1, 9_000)), True),
        (np.zeros(100), False),
        (["a"] * 9_000, True),
        (["a"] * 100, False),
    ],
)
def test_only_large_values_are_written_in_turns(value: Any, is_written_in_turns: bool) -> None:
    assert is_large({"a": 1, "y": value}) == is_written_in_turns
