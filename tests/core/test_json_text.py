"""Large arrays are written in pieces, so that the event loop can run other work in between; the JSON is the same."""

import asyncio
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import json
from app.core.json import is_large, json_in_turns, json_of

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
