import numpy as np
import pytest

from app.core.inference import DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES, bytes_array


def test_every_datatype_is_an_integer_a_float_a_bool_or_bytes() -> None:
    assert INTEGER_DATATYPES | FLOAT_DATATYPES | {"BOOL", "BYTES"} == set(DTYPE_BY_DATATYPE)


@pytest.mark.parametrize("datatype", sorted(INTEGER_DATATYPES | FLOAT_DATATYPES))
def test_the_size_matches_the_name(datatype: str) -> None:
    assert str(DTYPE_BY_DATATYPE[datatype].itemsize * 8) == datatype.lstrip("UINTBFP")


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (2, 1, 1)])
def test_bytes_keep_their_trailing_nuls_and_their_shape(shape: tuple[int, ...]) -> None:
    array = bytes_array([b"a\0", b"\0\0"], shape)
    assert array.shape == shape
    assert list(array.flat) == [b"a\0", b"\0\0"]


def test_an_empty_bytes_array_keeps_its_rank() -> None:
    assert bytes_array([], (0, 4)).shape == (0, 4)
    assert bytes_array([], (0,)).dtype == np.object_
