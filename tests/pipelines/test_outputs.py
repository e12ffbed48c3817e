"""Output fields: shapes, single values, batches, and tensors that do not match their declaration."""

from itertools import combinations
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.codecs.kinds import declared_shape, fits
from app.core.errors import ContractViolation
from app.core.inference import DTYPE_BY_DATATYPE, Tensor, bytes_array
from app.pipelines.fields import OutputField
from tests.toolkit.models import model, pipeline, tensor


def field(text: str, max_batch_size: int = 0, *, batch: bool = False, **spec: Any) -> OutputField:
    kind = {} if "BYTES" not in text or "kind" in spec else {"kind": "text"}
    config = model([], text, max_batch_size=max_batch_size)
    outputs = {"y": {"tensor": text.partition(" ")[0], **kind, **spec}}
    return pipeline(config, outputs=outputs, batch=batch).outputs[0]


def rendered(output: OutputField, array: Any, items: int = 1) -> Any:
    """Returns the JSON for the caller from Triton's array."""
    value = output.value_of(output.array_of(Tensor("Y", output.tensor.datatype, array), items))
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


F32 = np.float32
KINDS = [("text", "ab"), ("binary", "YWI="), ("image", "YWI=")]
BYTES_8 = {"kind": "text", "max_batch_size": 8}
BATCH = {"max_batch_size": 8, "batch": True}
WORD = np.frombuffer("zw\u00f6lf".encode(), np.uint8)


def texts(*values: bytes, shape: tuple[int, ...] | None = None) -> Any:
    return bytes_array(list(values), (len(values),) if shape is None else shape)


def counted(*shape: int) -> Any:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


@pytest.mark.parametrize(
    ("text", "spec", "array", "value"),
    [
        # lists nest by shape; a single element is a bare value, a variable dimension always a list
        ("Y FP32 [-1,2]", {}, F32([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ("Y FP32 [1]", {}, F32([2.5]), 2.5),
        ("Y FP32 []", {}, np.full((), 2.5, F32), 2.5),
        ("Y FP32 [-1]", {}, F32([7]), [7]),
        ("Y UINT32 [1]", {}, np.array(7, np.uint32), 7),  # the token count of vLLM
        ("Y FP32 [1]", {}, F32([np.nan]), None),
        # the batch dimension is removed; with batch the caller gets a list of items
        ("Y FP32 [2]", {"max_batch_size": 8}, F32([[1, 2]]), [1, 2]),
        ("Y FP32 [1]", {"max_batch_size": 8}, F32([[1]]), 1),
        ("Y FP32 [2]", BATCH, F32([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ("Y FP32 [1]", BATCH, F32([[1], [2]]), [1, 2]),
        # bytes are text or base64, JSON is passed unchanged
        *(("Y BYTES [1]", {"kind": kind}, texts(b"ab"), value) for kind, value in KINDS),
        *(
            ("Y BYTES [-1,1]", {"kind": kind}, texts(b"ab", b"ab", shape=(2, 1)), [[value]] * 2)
            for kind, value in KINDS
        ),
        ("Y BYTES [1]", {"kind": "json"}, texts(b"[1, 2]"), [1, 2]),
        ("Y BYTES [-1]", {"kind": "json"}, texts(b"[1]", b"{}"), [[1], {}]),
        ("Y BYTES [-1]", {"single": True}, texts(b"ab"), "ab"),
        # a text in 8-bit numbers is one value, and may be empty
        ("Y UINT8 [-1]", {"kind": "text"}, WORD, "zw\u00f6lf"),
        ("Y UINT8 [-1]", BYTES_8, WORD[np.newaxis], "zw\u00f6lf"),
        ("Y UINT8 [-1]", BYTES_8, WORD, "zw\u00f6lf"),
        ("Y INT8 [1,-1]", {"kind": "binary", "max_batch_size": 8}, WORD.view(np.int8)[None, None], "enfDtmxm"),
        ("Y UINT8 [-1]", {"kind": "text", **BATCH}, np.uint8([[97, 98], [99, 100]]), ["ab", "cd"]),
        ("Y UINT8 [-1]", {"kind": "text"}, np.empty(0, np.uint8), ""),
        # Triton checks no output: dimensions of size 1 may be missing or extra
        ("Y BYTES [1]", {"max_batch_size": 8}, texts(b"ab"), "ab"),
        ("Y BYTES [1]", {}, texts(b"ab", shape=(1, 1)), "ab"),
        ("Y INT64 [1]", {}, counted(1, 1), 0),
        ("Y INT64 [1]", {}, counted(), 0),
        ("Y INT64 []", {}, counted(1), 0),
        *(("Y INT64 [1]", {"max_batch_size": 8}, counted(*shape), 0) for shape in ((1,), (), (1, 1, 1))),
        ("Y INT64 [3]", {}, counted(1, 3), [0, 1, 2]),
        ("Y INT64 [3]", {}, counted(3, 1), [0, 1, 2]),
        ("Y INT64 [3]", {"max_batch_size": 8}, counted(3), [0, 1, 2]),
        ("Y INT64 [-1]", {}, counted(), [0]),
        ("Y INT64 [-1]", {"max_batch_size": 8}, counted(3), [0, 1, 2]),
        ("Y INT64 [-1,1]", {}, counted(3), [[0], [1], [2]]),
        ("Y INT64 [1,-1]", {}, counted(3), [[0, 1, 2]]),
        ("Y INT64 [-1,3,-1]", {}, counted(3), [[[0], [1], [2]]]),
        ("Y INT64 [-1,3]", {"max_batch_size": 8}, counted(3), [[0, 1, 2]]),
        ("Y INT64 [-1,-1]", {}, counted(1, 1, 3), [[0, 1, 2]]),
        ("Y INT64 [-1,-1]", {"max_batch_size": 8}, counted(1, 3), [[0, 1, 2]]),
    ],
    ids=str,
)
def test_an_array_is_rendered(text: str, spec: dict[str, Any], array: Any, value: Any) -> None:
    assert rendered(field(text, **spec), array) == value


@pytest.mark.parametrize(
    ("text", "spec", "array", "match"),
    [
        ("Y FP32 [2]", {}, np.zeros(3, F32), r"has shape \["),
        ("Y FP32 [2]", {}, np.zeros((2, 2), F32), r"has shape \["),
        ("Y FP32 [1]", {}, np.zeros(2, F32), r"has shape \["),
        ("Y FP32 [2]", {"max_batch_size": 8}, np.zeros((2, 2), F32), r"has shape \["),
        ("Y FP32 [1]", {"max_batch_size": 8}, np.zeros(2, F32), r"has shape \["),
        ("Y FP32 [2,3]", {}, np.zeros(6, F32), r"has shape \["),
        ("Y FP32 [2,3]", {}, np.zeros((3, 2), F32), r"has shape \["),
        ("Y FP32 [-1]", {}, np.zeros((2, 2), F32), r"has shape \["),
        ("Y FP32 [-1,-1]", {}, np.zeros(5, F32), r"has shape \["),
        ("Y FP32 [-1,-1]", {"max_batch_size": 8}, np.zeros(5, F32), r"has shape \["),
        ("Y BYTES [-1]", {"single": True}, texts(b"ab", b"cd"), r"has shape \[2\]; \[1\] is declared"),
        ("Y UINT8 [-1]", BYTES_8, np.uint8([[97, 98], [97, 98]]), r"has shape \[2,2\]; \[1,-1\] is declared"),
        ("Y INT64 [1]", BATCH, counted(3), r"has shape \[3\]; \[-1,1\] is declared"),
    ],
)
def test_another_shape_is_a_violation(text: str, spec: dict[str, Any], array: Any, match: str) -> None:
    with pytest.raises(ContractViolation, match=match) as caught:
        rendered(field(text, **spec), array)
    assert caught.value.tensor == "Y"
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("text", "array"), [("Y FP32 [2]", np.zeros((3, 2), F32)), ("Y INT64 [1]", counted(3))], ids=str
)
def test_rows_that_are_not_the_items_need_batch(text: str, array: Any) -> None:
    with pytest.raises(ContractViolation, match=r"has shape \[3") as caught:
        rendered(field(text, 8), array)
    assert caught.value.hint == "The model wrote 3 rows for one item. With batch: true the answer has all rows."


def test_invalid_json_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match="is not JSON"):
        rendered(field("Y BYTES [1]", kind="json"), texts(b"{secret"))


@pytest.mark.parametrize(
    ("text", "shape", "items", "value"),
    [
        ("Y INT64 [1]", (2,), 2, [0, 1]),
        ("Y INT64 [1]", (), 1, [0]),
        ("Y INT64 [1]", (2, 1, 1), 2, [0, 1]),
        ("Y INT64 [3]", (3,), 1, [[0, 1, 2]]),
        ("Y INT64 [-1]", (3,), 1, [[0, 1, 2]]),
        ("Y INT64 [-1]", (3,), 3, [[0], [1], [2]]),
    ],
)
def test_with_batch_there_is_a_value_for_each_item(text: str, shape: tuple[int, ...], items: int, value: Any) -> None:
    assert rendered(field(text, 8, batch=True), counted(*shape), items) == value


@pytest.mark.parametrize(
    ("declared", "written", "value", "remedy"),
    [
        ("FP32", "FP64", 1e300, "`.astype(np.float32)`, or declare `data_type: TYPE_FP64`"),
        ("FP32", "INT64", 2**24 + 1, "`.astype(np.float32)`, or declare `data_type: TYPE_INT64`"),
        ("INT32", "INT64", 2**31, "`.astype(np.int32)`, or declare `data_type: TYPE_INT64`"),
        ("UINT64", "INT64", -1, "`.astype(np.uint64)`, or declare `data_type: TYPE_INT64`"),
        ("INT32", "FP32", 1.0, "`.astype(np.int32)`, or declare `data_type: TYPE_FP32`"),
        ("BOOL", "UINT8", 2, "`.astype(np.bool_)`, or declare `data_type: TYPE_UINT8`"),
        ("BF16", "FP64", 1e300, "`.astype(ml_dtypes.bfloat16)`, or declare `data_type: TYPE_FP64`"),
        ("BYTES", "INT32", 1, "`.astype(np.object_)`, or declare `data_type: TYPE_INT32`"),
        ("INT32", "BYTES", b"1", "`.astype(np.int32)`, or declare `data_type: TYPE_STRING`"),
    ],
)
def test_a_datatype_that_does_not_hold_the_numbers(declared: str, written: str, value: Any, remedy: str) -> None:
    with pytest.raises(ContractViolation, match=f"is {written}; {declared} is declared") as caught:
        field(f"Y {declared} [1]").array_of(tensor("Y", written, [value]))
    assert remedy in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("declared", "written", "values", "value"),
    [
        ("FP32", "FP64", [2.0, 0.1], [2.0, 0.1]),
        ("FP16", "FP64", [0.5, 65504.0], [0.5, 65504.0]),
        ("BF16", "FP32", [0.5], [0.5]),
        ("FP32", "BF16", [0.5], [0.5]),
        ("FP64", "FP32", [0.5], [0.5]),
        ("FP32", "FP64", [np.nan, np.inf], [None, None]),
        ("INT32", "INT64", [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
        ("UINT8", "INT64", [0, 255], [0, 255]),
        ("INT64", "INT32", [-5], [-5]),
        ("FP32", "INT64", [3, -(2**24)], [3.0, -(2.0**24)]),
        ("BOOL", "UINT8", [0, 1], [False, True]),
        ("INT32", "BOOL", [False, True], [0, 1]),
        ("INT32", "FP64", [], []),
        ("BYTES", "FP64", [], []),
    ],
)
def test_numbers_that_the_declared_datatype_holds(declared: str, written: str, values: list[Any], value: Any) -> None:
    output = field(f"Y {declared} [-1]")
    array = output.array_of(tensor("Y", written, values))
    found = orjson.loads(orjson.dumps(output.value_of(array), option=orjson.OPT_SERIALIZE_NUMPY))
    assert found == value
    assert array.size == 0 or array.dtype == DTYPE_BY_DATATYPE[declared]


def test_a_text_in_8_bit_numbers_may_have_another_datatype() -> None:
    """As `np.array([])` of a model that exits early."""
    output = field("Y UINT8 [-1]", 8, kind="text")
    assert output.array_of(Tensor("Y", "INT64", np.int64([[97, 98, 99]]))).tolist() == [b"abc"]
    assert field("Y UINT8 [-1]", kind="text").array_of(Tensor("Y", "FP64", np.empty(0))).size == 0


DIMS = st.lists(st.sampled_from([-1, -1, 1, 2, 3]), max_size=4).map(tuple)


def agreeing(shape: tuple[int, ...], dims: tuple[int, ...]) -> set[tuple[int, ...]]:
    """All shapes that agree with ``dims`` and have the sizes of ``shape`` other than 1, by definition."""
    sizes = [size for size in shape if size != 1]
    found = set()
    for places in combinations(range(len(dims)), len(sizes)):
        whole = [1] * len(dims)
        for place, size in zip(places, sizes, strict=True):
            whole[place] = size
        if fits(tuple(whole), dims):
            found.add(tuple(whole))
    return found


@given(DIMS, st.lists(st.sampled_from([1, 1, 2, 3, 4]), max_size=5).map(tuple))
def test_the_declared_shape_is_the_only_one_that_agrees(dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    found, possible = declared_shape(shape, dims), agreeing(shape, dims)
    if found is None:
        assert len(possible) != 1
    elif found != shape:
        assert found in possible
        assert possible == {found} or shape == (1, *found) or found == (1, *shape)


@given(DIMS, st.booleans(), st.data())
def test_a_model_that_adds_or_drops_dimensions_of_1(
    dims: tuple[int, ...], has_batch: bool, data: st.DataObject
) -> None:
    """The value is the declared one; or a violation, if another nesting of the same elements agrees as well."""
    dims = dims or (1,)  # Triton refuses a model without dims
    whole = tuple(data.draw(st.integers(1, 3)) if dim == -1 else dim for dim in dims)
    right = np.arange(np.prod(whole, dtype=int)).reshape(whole)
    shape = list((1, *whole) if has_batch else whole)
    for place in reversed(range(len(shape))):
        if shape[place] == 1 and data.draw(st.booleans()):
            del shape[place]
    for _ in range(data.draw(st.integers(0, 2))):
        shape.insert(data.draw(st.integers(0, len(shape))), 1)
    output = field(f"Y INT64 [{','.join(map(str, dims))}]", 8 if has_batch else 0)
    given_dims = (1, *dims) if has_batch else dims
    try:
        found = rendered(output, right.reshape(shape))
    except ContractViolation:
        assert len(agreeing(tuple(shape), given_dims)) > 1
        return
    wanted = rendered(output, right.reshape((1, *whole) if has_batch else whole))
    if len(agreeing(tuple(shape), given_dims)) == 1:
        assert found == wanted
    assert np.array(found).reshape(-1).tolist() == right.reshape(-1).tolist()
