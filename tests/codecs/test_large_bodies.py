"""Both readers and both codecs of numbers have the same result for every body, and large bodies use little memory."""

import json
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.codecs import json_scan
from app.codecs import numbers as numbers_module
from app.codecs.numbers import NumberCodec, number_codec
from app.core.errors import FieldProblem, GatewayError, InvalidInput
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES, Array
from app.pipelines.fields import InputField
from app.pipelines.pipeline import Pipeline
from tests.docs.pages import ROOT
from tests.toolkit.models import model, pipeline

MIB = 1024 * 1024
CONFIG = model(
    [
        "D FP64 [-1] optional",
        "F FP32 [-1,2] optional",
        "H FP16 [-1] optional",
        "E BF16 [3] optional",
        "L INT64 [-1] optional",
        "U UINT64 [-1,-1,2] optional",
        "I INT32 [-1,2] optional",
        "B INT8 [-1] optional",
        "C UINT8 [2,2] optional",
        "O BOOL [-1] optional",
        "M INT32 [-1] optional",
        "N FP32 [-1] optional",
        "S INT16 [-1] optional",
        "Q FP32 [-1,2] optional",
        "V BOOL [-1,-1,2] optional",
        "X FP32 [384] optional",
        "K INT32 [1] optional",
        "NOTE BYTES [1] optional",
        "W BYTES [-1] optional",
        "T BYTES [2,2] optional",
        "DOC BYTES [1] optional",
        "FILE BYTES [-1] optional",
    ]
)
BOUNDS: dict[str, dict[str, Any]] = {
    "m": {"minimum": -1.5, "maximum": 1000},
    "n": {"minimum": 0, "maximum": 1.5},
    "s": {"enum": [1, 2, 300]},
    "q": {"missing": "nan", "minimum": -2},
}
KINDS = {"note": "text", "w": "text", "t": "text", "doc": "json", "file": "binary"}
FIELDS = {tensor.name.lower(): tensor for tensor in CONFIG.inputs}
NUMBERS = sorted(FIELDS.keys() - KINDS.keys() - {"x", "k"})
"""The fields with lists of numbers that are generated."""


def list_codec(*given: Any, **more: Any) -> NumberCodec:
    """Returns the codec that creates Python objects."""
    return replace(number_codec(*given, **more), of_type=None)


needs_simdjson = pytest.mark.skipif(not numbers_module.HAS_SIMDJSON, reason="pysimdjson has no wheel for this Python")


def compiled() -> Pipeline:
    """Returns a pipeline with optional inputs, so that a body may contain any of them."""
    inputs = {
        name: {"tensor": tensor.name, "optional": True, "kind": KINDS.get(name, "number"), **BOUNDS.get(name, {})}
        for name, tensor in FIELDS.items()
    }
    return pipeline(CONFIG, inputs=inputs, parameters={"p": {"type": "integer", "optional": True}})


BY_BUFFERS = compiled()
with patch("app.pipelines.fields.number_codec", list_codec):
    BY_LISTS = compiled()


@contextmanager
def every_body_is_large(piece_bytes: int) -> Iterator[None]:
    with (
        patch("app.pipelines.body.LARGE_BYTES", 0),
        patch.object(json_scan, "PIECE_BYTES", piece_bytes),
        patch.object(numbers_module, "PIECE_BYTES", piece_bytes),
    ):
        yield


def result_of(reader: Pipeline, body: bytes) -> Any:
    """Returns the exact tensors, or code, text and fields of the error."""
    try:
        request = reader.request_of_json(body)
    except GatewayError as exc:
        return exc.code, exc.detail, exc.hint, exc.errors
    contents = [each.array.tolist() if each.datatype == BYTES else each.array.tobytes() for each in request.inputs]
    return [(each.name, each.array.dtype, each.shape, x) for each, x in zip(request.inputs, contents, strict=True)]


def fields_of(errors: Sequence[FieldProblem]) -> set[str]:
    return {found.field.partition("[")[0] for found in errors}


def check_both(body: bytes) -> None:
    """Reads a large body with both codecs, and a small body, whose error may name fewer or other problems."""
    at_once = result_of(BY_LISTS, body)
    for piece_bytes in (8, 64 * 1024):
        with every_body_is_large(piece_bytes):
            found = result_of(BY_BUFFERS, body)
            assert found == result_of(BY_LISTS, body)
        if isinstance(at_once, list):
            assert found == at_once
        else:
            small, large = fields_of(at_once[3]), fields_of(found[3])
            assert found[0] == at_once[0]
            assert small == large or small & large


EDGES = (
    "0 -0 -0.0 1 -1 2 300 127 128 -128 -129 255 256 65504 65520 1e5 1E+5 -0e1 0e99999 1e-400 1e400 1e39 3.4028235e38 "
    "3.4028236e38 1.7976931348623157e308 1.7976931348623159e308 4.9e-324 2e-324 2147483647 2147483648 -2147483649 "
    "9007199254740993 9007199254740993.0 9223372036854775807 9223372036854775808 -9223372036854775808 "
    "-9223372036854775809 18446744073709551615 18446744073709551616 123456789012345678901234567890 "
    "0.1000000000000000055511151231257827021181583404541015625 1.0 01 1. .5 +1 1e 1e+ - -- 0x1 1_0 NaN Infinity "
    '-Infinity nan null true false "1" "" {} {"a":1} [] \ufeff1 \u0661 é'
)
integers = st.integers(-(2**70), 2**70).map(str)
tokens = (
    st.sampled_from(EDGES.split())
    | integers
    | st.integers(-300, 300).map(str)
    | st.floats().map(json.dumps)
    | st.floats(0, 1, width=32).map(json.dumps)
)
numbers = st.integers(-9, 300).map(str)
spaces = st.sampled_from(["", "", "", " ", "\n\t", "  \r\n "])


def listed(elements: st.SearchStrategy[str], most: int = 5) -> st.SearchStrategy[str]:
    """Generates a JSON list of the elements, with whitespace."""
    return st.tuples(spaces, st.lists(elements, max_size=most), spaces).map(
        lambda found: f"{found[0]}[{found[2]}{(',' + found[0]).join(found[1])}{found[0]}]{found[2]}"
    )


def nested(shape: Sequence[int], elements: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Generates nested lists with equal lengths at each level."""
    for size in reversed(shape):
        elements = st.lists(elements, min_size=size, max_size=size).map(lambda found: f"[{','.join(found)}]")
    return elements


def fitting(name: str) -> st.SearchStrategy[str]:
    """Generates lists with the shape of a field, of valid numbers or of any tokens."""
    shapes = st.tuples(*(st.integers(1, 3) if dim < 0 else st.just(dim) for dim in FIELDS[name].dims))
    elements = [st.integers(0, 2).map(str), numbers, st.floats(-2, 2).map(json.dumps), integers, tokens]
    return st.tuples(shapes, st.sampled_from(elements)).flatmap(lambda found: nested(*found))


lists = (
    listed(tokens)
    | st.recursive(numbers, lambda inner: listed(inner, most=3))
    | listed(listed(numbers, most=3))
    | listed(listed(listed(tokens, most=2), most=2), most=3)
    | st.lists(st.integers(0, 3), min_size=1, max_size=3).flatmap(lambda shape: nested(shape, numbers))
    | st.integers(1, 70).map(lambda depth: "[" * depth + "1" + "]" * depth)
    | tokens
)
names = st.sampled_from(NUMBERS)
members = (
    names.flatmap(lambda name: st.tuples(st.just(name), fitting(name)))
    | names.flatmap(lambda name: st.tuples(st.just(name), fitting(name)))
    | st.tuples(names | st.sampled_from(["zz", "\\u0064"]), lists)
)
scalars = st.none() | st.booleans() | st.text(max_size=4) | st.sampled_from(['"', "\\", '\\"', "[", "a,b", 7, 0.5])
values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=3), scalars)
any_names = st.sampled_from([*KINDS, "d", "v", "p", "zz", "\\", '"']).map(lambda name: json.dumps(name)[1:-1])
malformed = st.text(st.sampled_from('[]{},:"\\ 01-.etn'), max_size=24)
others = st.tuples(any_names, values.map(json.dumps))


def bodies_of(members: st.SearchStrategy[tuple[str, str]], least: int = 1) -> st.SearchStrategy[str]:
    return st.lists(members, min_size=least, max_size=3).map(
        lambda found: "{" + ", ".join(f'"{name}": {value}' for name, value in found) + "}"
    )


bodies = bodies_of(members)


@given(bodies_of(others, 0), any_names, malformed)
def test_both_readers_agree_on_any_members_and_malformed_values(body: str, name: str, text: str) -> None:
    for each in (body, f'{{"{name}": {text}}}', text):
        check_both(each.encode())


@given(bodies, st.data())
def test_both_codecs_agree_on_any_lists_and_damaged_bodies(body: str, data: st.DataObject) -> None:
    text = body.encode()
    check_both(text)
    at = data.draw(st.integers(0, len(text)))
    damage = data.draw(
        st.sampled_from([b"", b",", b"[", b"]", b"}", b'"', b" ", b"1", b"\0", b"\xff", b"\\", b"e", b"{"])
    )
    check_both(text[:at] + damage + text[at + data.draw(st.integers(0, 2)) :])
    check_both(text[:at])
    check_both(text[at:])
    check_both(text + damage)


@given(st.sampled_from(sorted(FLOAT_DATATYPES)), st.lists(st.floats(-(2.0**15), 2.0**15), min_size=1))
def test_floats_are_rounded_to_the_nearest_value(datatype: str, values: list[float]) -> None:
    expected = np.array(values, np.float64).astype(DTYPE_BY_DATATYPE[datatype])
    assert decoded(datatype, json.dumps(values)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("datatype", sorted(INTEGER_DATATYPES))
def test_integers_are_exact_and_never_wrap(datatype: str) -> None:
    limits = np.iinfo(DTYPE_BY_DATATYPE[datatype])
    extremes = [int(limits.min), int(limits.max), int(limits.max) - 1, int(limits.max) // 2]
    assert decoded(datatype, json.dumps(extremes)).tolist() == extremes
    for beyond in (int(limits.min) - 1, int(limits.max) + 1):
        with pytest.raises((ValueError, InvalidInput)):
            decoded(datatype, json.dumps([0, beyond]))


def decoded(datatype: str, text: str) -> Array:
    field = pipeline(model(f"X {datatype} [-1]")).inputs[0]
    array: Array = field.decode_large(memoryview(text.encode()))
    assert array.dtype == DTYPE_BY_DATATYPE[datatype]
    return array


def test_without_simdjson_lists_are_decoded_by_msgspec() -> None:
    program = """
import sys
sys.modules["simdjson"] = None
from tests.codecs.test_large_bodies import compiled
field = compiled().inputs[0]
print(field._numbers.of_type, field.decode_large(memoryview(b"[1.5, 2]")).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "None [1.5, 2.0]\n", done.stderr


@needs_simdjson
@pytest.mark.parametrize("name", sorted({*NUMBERS} - {"o", "s", "v"}))
def test_valid_numbers_are_decoded_without_python_objects(name: str) -> None:
    field = next(field for field in BY_BUFFERS.inputs if field.name == name)
    assert buffers_of(field).decode(b"[1, 0, 1]").tolist() == [1, 0, 1]


def buffers_of(field: InputField) -> NumberCodec:
    """Returns the field's codec; it raises an error instead of creating Python objects."""

    def refused(_text: bytes) -> Array:
        raise AssertionError("a valid list is decoded through Python objects")

    assert field._numbers.of_type is not None
    return replace(field._numbers, lists=refused)


@needs_simdjson
def test_a_long_text_without_commas_skips_the_parser() -> None:
    """The parser would keep memory of 14 times the text's length."""
    text = b"[" + b" " * 200_000 + b"7]"
    with pytest.raises(AssertionError, match="Python objects"):
        buffers_of(BY_BUFFERS.inputs[0]).decode(text)
    assert decoded("FP64", f"[1,{text.decode()[1:]}").tolist() == [1, 7]


def test_threads_do_not_share_a_parser() -> None:
    bodies = [orjson.dumps({"d": [float(number)] * 40_000}) for number in range(4)]
    found: list[set[float]] = [set() for _ in bodies]

    def read(index: int) -> None:
        for _ in range(5):
            found[index].update(BY_BUFFERS.request_of_json(bodies[index]).inputs[0].array.tolist())

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{float(index)} for index in range(len(bodies))]


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
def test_both_codecs_agree_on_edges(value: bytes) -> None:
    check_both(b'{"i": %s}' % value)
    check_both(b'{"l": %s}' % value)


@pytest.mark.parametrize("text", [r'"a\"b"', r'"a\\"', r'"\\\""', r'"a\\", "w": ["\""]', r'"a\"', r'"\u005c"', '"[{"'])
def test_both_readers_agree_on_texts_with_escapes(text: str) -> None:
    for spaces in range(8):  # every place of an escape within a piece
        check_both(f'{{{" " * spaces}"note": {text}}}'.encode())


def test_the_error_names_the_position_of_an_invalid_number() -> None:
    rows = [[1, 2]] * 30_000 + [[3, 4.5]]
    with pytest.raises(InvalidInput) as caught:
        BY_BUFFERS.request_of_json(json.dumps({"i": rows}).encode())
    assert [(found.field, found.problem) for found in caught.value.errors] == [
        ("i[30000][1]", "must be an integer, not a decimal number")
    ]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("x", "[" + "1," * 100_000 + "1]", "has shape [100001]; expected [384]"),
        ("w", "[" + '"",' * 65_536 + '""]', "has more than 65536 elements"),
        ("t", "[[" + '"",' * 65_536 + '""]]', "has more than 4 elements"),
        ("note", "[" + '"",' * 65_536 + '""]', "has more than 1 elements"),
        ("k", "[" + "1," * 65_536 + "1]", "has more than 1 elements"),
        ("i", "[" + "1," * 65_536 + "1]", "must be nested 2 lists deep, not 1"),
    ],
)
def test_counts_are_limited_by_the_declaration(field: str, value: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        BY_BUFFERS.request_of_json(f'{{"{field}": {value}}}'.encode())
    assert [(found.field, found.problem) for found in caught.value.errors] == [(field, problem)]


def test_a_list_of_texts_has_the_documented_limit() -> None:
    body = json.dumps({"w": ["a,b"] * 65_536}).encode()
    assert BY_BUFFERS.request_of_json(body).inputs[0].shape == (65_536,)


def test_a_large_list_may_have_as_many_texts_as_items() -> None:
    several = pipeline(model("W BYTES [2]", max_batch_size=8), batch={"max_items": 9})
    body = json.dumps({"W": [["x" * 4096] * 2] * 9}).encode()
    assert several.request_of_json(body).inputs[0].shape == (9, 2)


@pytest.mark.parametrize("deep", [b"[" * 63 + b"]" * 63, b'{"a":' * 63 + b"1" + b"}" * 63, b'"' + b"[" * 99 + b'"'])
def test_json_values_may_be_64_levels_deep(deep: bytes) -> None:
    assert BY_BUFFERS.request_of_json(b'{"doc": %s}' % deep).inputs[0].array.tolist() == [deep]


@pytest.mark.parametrize("name", ["doc", "x", "zz"])
@pytest.mark.parametrize("padding", [0, 70_000])
def test_deeper_values_are_rejected(name: str, padding: int) -> None:
    with pytest.raises(GatewayError) as caught:
        BY_BUFFERS.request_of_json(b'{"%s": %s%s%s}' % (name.encode(), b"[" * 64, b" " * padding, b"]" * 64))
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
        '{"l": [' + "1," * MIB + '"a"]}',
        '{"l": [' + "1," * MIB + "1.5]}",
        '{"l": [' + "1," * MIB + "1",
        '{"i": [' + "[]," * 700_000 + "[]]}",
        '{"l": [' + "[]," * 700_000 + "[]]}",
        '{"v": [[' + "[]," * 700_000 + "[]]]}",
        '{"i": [' + "[1]," * 500_000 + "[1]]}",
        '{"i": ' + "[" * MIB,
        '{"v": [' + "[[true,false]]," * 100_000 + "[[1]]]}",
        '{"p": [' + "1," * MIB + "1]}",
        '{"zz": [' + "1," * MIB + "1]}",
        '{"doc": [' + '"",' * 700_000 + '""], "zz": 1}',
        "[" + "1," * MIB + "1]",
    ],
    ids=lambda text: f"{text[:20]} {text[-12:]}",
)
def test_a_rejected_body_uses_at_most_3_times_its_size(text: str) -> None:
    body = text.encode()
    assert peak_of(body, GatewayError) < 3 * len(body) + MIB


def peak_of(body: bytes, error: type[GatewayError]) -> int:
    """Returns the memory that a rejected body uses."""
    tracemalloc.start()
    with pytest.raises(error):
        BY_BUFFERS.request_of_json(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("start", "element", "end"),
    [(b'{"w": [', b'"",', b'""]}'), (b'{"l": [', b"[],", b"[]]}"), (b'{"x": {"a": [', b'"v",', b'"b"]}}')],
)
def test_a_value_with_an_invalid_start_is_not_copied(start: bytes, element: bytes, end: bytes) -> None:
    body = start + element * (8 * MIB // len(element)) + end
    assert peak_of(body, InvalidInput) < len(body) / 2
