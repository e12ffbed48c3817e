"""The values of a request: its id, its deadline and its arrays."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from app.core.inference import (
    DTYPE_BY_DATATYPE,
    FLOAT_DATATYPES,
    FLOOR_S,
    INTEGER_DATATYPES,
    Deadline,
    bytes_array,
    new_request_id,
)


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
