"""Large bodies have the same result as small bodies, with limited memory."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import GatewayError, InvalidInput
from app.core.inference import Array
from tests.codecs.test_number_codecs import every_body_is_large
from tests.toolkit.models import model, pipeline

MIB = 1024 * 1024
CONFIG = model(
    [
        "X FP32 [384] optional",
        "I INT64 [-1] optional",
        "G INT32 [-1,2] optional",
        "B BOOL [-1,-1,2] optional",
        "NOTE BYTES [1] optional",
        "W BYTES [-1] optional",
        "T BYTES [2,2] optional",
        "DOC BYTES [1] optional",
        "FILE BYTES [-1] optional",
        "K INT32 [1] optional",
    ]
)
KINDS = {"NOTE": "text", "W": "text", "T": "text", "DOC": "json", "FILE": "binary"}


INPUTS = {
    tensor.name.lower(): {"tensor": tensor.name, "kind": KINDS.get(tensor.name, "number"), "optional": True}
    for tensor in CONFIG.inputs
}
P = pipeline(CONFIG, inputs=INPUTS, parameters={"n": {"type": "integer", "optional": True}})
"""All inputs are optional, so that a body may contain any of them."""


def result_of(body: bytes) -> Any:
    """Returns the exact arrays by tensor, or the code of the error and the fields that it names."""
    try:
        request = P.request_of_json(body)
    except GatewayError as exc:
        return exc.code, {found.field.partition("[")[0] for found in exc.errors}
    return {tensor.name: (tensor.array.dtype, tensor.shape, _content(tensor.array)) for tensor in request.inputs}


def _content(array: Array) -> Any:
    return array.tolist() if array.dtype.kind == "O" else array.tobytes()


def check_both_readers(body: bytes) -> None:
    """Checks that both readers have the same result: the reader of small bodies, and the reader of large bodies.

    If several fields are invalid, each reader may name only some of them.
    """
    as_small = result_of(body)
    with every_body_is_large(8):
        as_large = result_of(body)
    if isinstance(as_small, dict):
        assert as_large == as_small
    else:
        assert as_large[0] == as_small[0]
        assert as_large[1] == as_small[1] or as_large[1] & as_small[1]


numbers = st.integers(-(2**70), 2**70) | st.floats() | st.integers(-9, 9)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=4) | st.sampled_from(['"', "\\", '\\"', "[", "a,b"])
lists = st.recursive(st.lists(numbers | st.booleans(), max_size=4), lambda inner: st.lists(inner, max_size=3))
regular = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)).flatmap(
    lambda shape: st.sampled_from(
        [np.zeros(shape[:rank], dtype).tolist() for rank in (1, 2, 3) for dtype in (int, bool)]
    )
)
values = scalars | lists | regular | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=3), scalars)
names = st.sampled_from([tensor.name.lower() for tensor in CONFIG.inputs] + ["n", "zz", "\\", '"'])


@given(st.lists(st.tuples(names, values), max_size=4))
def test_both_readers_agree_on_any_members(members: list[tuple[str, Any]]) -> None:
    pairs = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members)
    check_both_readers(f"{{{pairs}}}".encode())


@given(st.text(st.sampled_from('[]{},:"\\ 01-.etn'), max_size=24), names)
def test_both_readers_agree_on_valid_and_malformed_values(text: str, name: str) -> None:
    check_both_readers(f"{{{json.dumps(name)}: {text}}}".encode())
    check_both_readers(text.encode())


@pytest.mark.parametrize(
    "value",
    [
        b"[1,2,]", b"[,1]", b"[1,,2]", b"[1 2]", b"[1][2]", b"1[2]", b"[1]2", b"[[1,2],3[,4]]", b"[[1,2][3,4]]",
        b"[[1,2],[3,4]", b"[[1,2],[3,4]]]", b"[]", b"[[]]", b"[[],[]]", b"[[],[1,2]]", b"[[1,2],[]]", b"[[],[[]]]",
        b"[[1],[2]]", b"[[1,2],[3]]", b"[1,2]", b"[[[1,2]]]", b"[[1,2],[3,null]]", b"[[1,2],[3,NaN]]", b"[[1,2e400]]",
        b"[[1,\"2\"]]", b"[[1,2.0]]", b"[[1,2],[true,4]]", b"[[01,2]]", b"[[1,-]]", b"[[1,2],[3,99999999999]]", b"null",
        b" [ [ 1 , 2 ] , [ 3 , 4 ] ] ", b"[[1,2],[3,4],[5,6],[7,8]]", b"[\x0b[1,2]]", b"[[1,2],]", b"[[1,2],,[3,4]]",
        b"[1,[2]]", b"[1,[2],3]", b"[[1],2]", b"[1,[]]", b"[1,{}]", b'[1,"2"]', b"[1,2],[3]", b"[1,2]]", b"[1,2] 3",
    ],
)  # fmt: skip
def test_both_readers_agree_on_lists_of_numbers(value: bytes) -> None:
    check_both_readers(b'{"g": %s}' % value)
    check_both_readers(b'{"i": %s}' % value)


def test_the_error_names_the_position_of_an_invalid_number() -> None:
    rows = [[1, 2]] * 30_000 + [[3, 4.5]]
    with pytest.raises(InvalidInput) as caught:
        P.request_of_json(json.dumps({"g": rows}).encode())
    assert [(found.field, found.problem) for found in caught.value.errors] == [
        ("g[30000][1]", "must be an integer, not a decimal number")
    ]


def test_a_large_array_is_complete() -> None:
    rows = np.arange(80_000).reshape(-1, 2)
    array = P.request_of_json(json.dumps({"g": rows.tolist()}).encode()).inputs[0].array
    assert array.dtype == np.int32
    assert (array == rows).all()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("x", "[" + "1," * 100_000 + "1]", "has shape [100001]; expected [384]"),
        ("w", "[" + '"",' * 65_536 + '""]', "has more than 65536 elements"),
        ("t", "[[" + '"",' * 65_536 + '""]]', "has more than 4 elements"),
        ("note", "[" + '"",' * 65_536 + '""]', "has more than 1 elements"),
        ("k", "[" + "1," * 65_536 + "1]", "has more than 1 elements"),
        ("g", "[" + "1," * 65_536 + "1]", "must be nested 2 lists deep, not 1"),
    ],
)
def test_counts_are_limited_by_the_declaration(field: str, value: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        P.request_of_json(f'{{"{field}": {value}}}'.encode())
    assert [(found.field, found.problem) for found in caught.value.errors] == [(field, problem)]


def test_a_list_of_texts_has_the_documented_limit() -> None:
    body = json.dumps({"w": ["a,b"] * 65_536}).encode()
    assert P.request_of_json(body).inputs[0].shape == (65_536,)


@pytest.mark.parametrize("deep", [b"[" * 63 + b"]" * 63, b'{"a":' * 63 + b"1" + b"}" * 63, b'"' + b"[" * 99 + b'"'])
def test_json_values_may_be_64_levels_deep(deep: bytes) -> None:
    assert P.request_of_json(b'{"doc": %s}' % deep).inputs[0].array.tolist() == [deep]


@pytest.mark.parametrize("name", ["doc", "x", "zz"])
@pytest.mark.parametrize("padding", [0, 70_000])
def test_deeper_values_are_rejected(name: str, padding: int) -> None:
    with pytest.raises(GatewayError) as caught:
        P.request_of_json(b'{"%s": %s%s%s}' % (name.encode(), b"[" * 64, b" " * padding, b"]" * 64))
    assert (caught.value.code, "too many nested levels" in caught.value.detail) == ("invalid_json", True)


@pytest.mark.parametrize(
    "text",
    [
        '{"w": [' + '"",' * 700_000 + '""]}',
        '{"note": [' + '"",' * 700_000 + '""]}',
        '{"file": [' + '"",' * 700_000 + '""]}',
        "{" + ",".join(f'"f{index}":1' for index in range(200_000)) + "}",
        "{" + '"zz":1,' * 200_000 + '"x":1}',
        "{" + '"x":1,' * 200_000 + '"x":1}',
        '{"x": [' + "1," * MIB + "1]}",
        '{"k": [' + "1," * MIB + "1]}",
        '{"i": [' + "1," * MIB + '"a"]}',
        '{"i": [' + "1," * MIB + "1.5]}",
        '{"i": [' + "1," * MIB + "1",
        '{"g": [' + "[]," * 700_000 + "[]]}",
        '{"i": [' + "[]," * 700_000 + "[]]}",
        '{"b": [[' + "[]," * 700_000 + "[]]]}",
        '{"g": [' + "[1]," * 500_000 + "[1]]}",
        '{"g": ' + "[" * MIB,
        '{"b": [' + "[[true,false]]," * 100_000 + "[[1]]]}",
        '{"n": [' + "1," * MIB + "1]}",
        '{"zz": [' + "1," * MIB + "1]}",
        '{"doc": [' + '"",' * 700_000 + '""], "zz": 1}',
        "[" + "1," * MIB + "1]",
    ],
    ids=lambda text: f"{text[:20]} {text[-12:]}",
)
def test_a_rejected_body_uses_at_most_3_times_its_size(text: str) -> None:
    body = text.encode()
    tracemalloc.start()
    with pytest.raises(GatewayError):
        P.request_of_json(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(body) + MIB


@pytest.mark.parametrize(
    ("start", "element", "end"),
    [(b'{"w": [', b'"",', b'""]}'), (b'{"i": [', b"[],", b"[]]}"), (b'{"x": {"a": [', b'"b",', b'"b"]}}')],
)
def test_a_value_with_an_invalid_start_is_not_copied(start: bytes, element: bytes, end: bytes) -> None:
    body = start + element * (8 * MIB // len(element)) + end
    tracemalloc.start()
    with pytest.raises(InvalidInput):
        P.request_of_json(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(body) / 2
