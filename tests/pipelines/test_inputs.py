"""Inputs and parameters: what a body becomes, which problems are reported, and which declarations are refused."""

from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError

from app.config.mismatch import PipelineMismatch
from app.core.errors import InvalidInput, InvalidJson
from app.core.inference import InferenceRequest
from app.pipelines.examples import request_schema
from app.pipelines.pipeline import Pipeline
from tests.toolkit.models import model, pipeline

MISSING = {"missing": "nan"}
LARGE = " " * 70_000
BATCHED = {"max_batch_size": 8, "batch": True}
NINE = {"max_batch_size": 8, "batch": {"max_items": 9}}
FLOATS = ("FP16", "BF16", "FP32", "FP64")
NO_NUMBERS = ["true", '"1"', "null", "{}", "[true]", '["1"]', "1e400", "1" * 400]
NOT_ALLOWED = "is not one of the allowed values"
NO_INTEGER = "must be an integer or a list, not a decimal number"
NOT_BASE64 = "is not base64: send the content of the file as base64 or as a data: URL, not its path"
NO_IMAGE = "is not an image of a known format (PNG, JPEG, GIF, WebP, BMP or TIFF)"
ONE_VALUE = r"one value: the tensor must have dims \[1\]"


def one_input(text: str, max_batch_size: int = 0, *, batch: Any = False, **spec: Any) -> Pipeline:
    """Returns a pipeline with one input ``x`` for the tensor that ``text`` describes."""
    kind = {} if "BYTES" not in text or "kind" in spec else {"kind": "text"}
    config = model(text, max_batch_size=max_batch_size)
    return pipeline(config, inputs={"x": {"tensor": text.partition(" ")[0], **kind, **spec}}, batch=batch)


def one_parameter(tensor: str | None = None, max_batch_size: int = 0, **spec: Any) -> Pipeline:
    config = model([] if tensor is None else tensor, max_batch_size=max_batch_size)
    own = {} if tensor is None else {"tensor": tensor.partition(" ")[0]}
    return pipeline(config, inputs={}, parameters={"p": {**spec, **own}})


def request_of(p: Pipeline, body: str) -> InferenceRequest:
    return p.request_of_json(body.encode())


def sent(p: Pipeline, body: str) -> Any:
    array = request_of(p, body).inputs[0].array
    return array.shape, array.tolist()


def problems(p: Pipeline, body: str) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        request_of(p, body)
    return {found.field: found.problem for found in caught.value.errors}


def is_nan(array: Any) -> Any:
    return np.isnan(array.astype(np.float32)).tolist()


@pytest.mark.parametrize(
    ("text", "spec", "value", "shape", "expected"),
    [
        # lists nest by shape; a single element may be bare or in a list
        ("X FP32 [-1,2]", {}, "[[1, 2], [3, 4.5]]", (2, 2), [[1, 2], [3, 4.5]]),
        ("X INT32 [1]", {}, "7", (1,), [7]),
        ("X INT32 [1]", {}, "[7]", (1,), [7]),
        ("X INT32 []", {}, "7", (), 7),
        ("X INT32 [-1]", {}, "[7]", (1,), [7]),
        ("X BYTES [-1,2]", {}, '[["a", "b"]]', (1, 2), [[b"a", b"b"]]),
        # an empty list keeps the declared rank
        ("X FP32 [-1,4,2]", {}, "[]", (0, 4, 2), []),
        ("X FP32 [-1,-1]", {}, "[]", (0, 0), []),
        ("X FP32 [-1,-1]", {}, "[[], []]", (2, 0), [[], []]),
        # batches
        ("X FP32 [2]", {"max_batch_size": 8}, "[1, 2]", (1, 2), [[1, 2]]),
        ("X BYTES [1]", {"max_batch_size": 8}, '"a"', (1, 1), [[b"a"]]),
        ("X FP32 [2]", BATCHED, "[[1, 2], [3, 4]]", (2, 2), [[1, 2], [3, 4]]),
        ("X BYTES [1]", BATCHED, '["a", "b"]', (2, 1), [[b"a"], [b"b"]]),
        ("X FP32 [2]", NINE, f"{[[0, 0]] * 9}", (9, 2), [[0, 0]] * 9),
        # bounds, enums, kinds
        ("X INT32 [1]", {"minimum": 0.5, "maximum": 2.5}, "1", (1,), [1]),
        ("X UINT8 [-1]", {"enum": [1, 2]}, "[1, 2]", (2,), [1, 2]),
        ("X BYTES [1]", {"enum": ["a", "b'`"]}, '"b\'`"', (1,), [b"b'`"]),
        ("X FP32 [1]", {}, "3", (1,), [3.0]),
        ("X BYTES [1]", {"kind": "image"}, '"iVBORw0KGgo="', (1,), [b"\x89PNG\r\n\x1a\n"]),
        ("X BYTES [-1]", {"kind": "binary"}, '["AAE=", ""]', (2,), [b"\0\1", b""]),
        ("X BYTES [1]", {"kind": "json"}, '{"a": [1, {"b": null}]}', (1,), [b'{"a": [1, {"b": null}]}']),
        ("X BYTES [1]", {"kind": "json"}, "null", (1,), [b"null"]),
        # null means the default
        ("X INT32 [1]", {"default": 5}, "null", (1,), [5]),
    ],
)  # fmt: skip
def test_a_value_is_sent(text: str, spec: dict[str, Any], value: str, shape: tuple[int, ...], expected: Any) -> None:
    assert sent(one_input(text, **spec), f'{{"x": {value}}}') == (shape, expected)


@pytest.mark.parametrize(
    ("text", "spec", "value", "found"),
    [
        ("X FP32 [3]", {}, "[1, 2]", {"x": "has shape [2]; expected [3]"}),
        ("X FP32 [3]", {}, "[]", {"x": "has shape [0]; expected [3]"}),
        ("X FP32 [-1,2]", {}, "[[1, 2, 3]]", {"x": "has shape [1,3]; expected [-1,2]"}),
        ("X FP32 [2,3]", {}, "[]", {"x": "has shape [0,3]; expected [2,3]"}),
        ("X FP32 [-1,-1]", {}, "[[1], [2, 3]]", {"x": "has lists of different lengths"}),
        ("X BYTES [-1,2]", {}, '[["a"], ["b", "c"]]', {"x": "has lists of different lengths"}),
        ("X INT32 [-1]", {}, "7", {"x": "must be a list, not an integer"}),
        ("X FP32 [-1]", {}, "[1, null]", {"x[1]": "must be a number, not null"}),
        ("X FP32 [-1]", {}, f"[1, null]{LARGE}", {"x[1]": "must be a number, not null"}),
        ("X FP32 [-1]", MISSING, "null", {"x": "is required"}),
        ("X FP32 [-1]", MISSING, f"null{LARGE}", {"x": "is required"}),
        ("X INT32 [1]", {}, "null", {"x": "is required"}),
        ("X FP32 [-1]", MISSING, "[null, 1e39]", {"x": "holds a number out of the range of FP32"}),
        ("X FP32 [-1]", {**MISSING, "minimum": 1, "maximum": 2}, "[null, 0]", {"x[1]": "must be a number >= 1.0"}),
        ("X FP32 [-1]", {**MISSING, "enum": [1, 2]}, "[null, 0]", {"x": NOT_ALLOWED}),
        ("X UINT8 [-1]", {"enum": [1, 2]}, "[3]", {"x[0]": NOT_ALLOWED}),
        ("X BYTES [1]", {"enum": ["a", "b'`"]}, '"<secret>"', {"x": NOT_ALLOWED}),
        *((f"X {each} [-1]", {"enum": [0.1, 2]}, "[0.1, 0.2]", {"x": NOT_ALLOWED}) for each in FLOATS),
        *(("X INT32 [1]", {}, each, {"x": NO_INTEGER}) for each in ("1.0", "1e3", "1.5")),
        ("X FP16 [1]", {}, "65520", {"x": "holds a number out of the range of FP16"}),
        ("X BF16 [1]", {}, "3.4e38", {"x": "holds a number out of the range of BF16"}),
        ("X FP32 [1]", {}, "-3.5e38", {"x": "holds a number out of the range of FP32"}),
        ("X BYTES [1]", {"kind": "image"}, '"AAAA"', {"x": NO_IMAGE}),
        ("X BYTES [1]", {"kind": "image"}, '"?"', {"x": NOT_BASE64}),
        ("X FP32 [2]", BATCHED, "[]", {"batch": "has 0 items; expected 1 to 4096"}),
        ("X FP32 [2]", BATCHED, f"{[[0, 0]] * 4097}", {"batch": "has 4097 items; expected 1 to 4096"}),
        ("X FP32 [2]", NINE, f"{[[0, 0]] * 10}", {"batch": "has 10 items; expected 1 to 9"}),
    ],
)  # fmt: skip
def test_a_problem_is_reported(text: str, spec: dict[str, Any], value: str, found: dict[str, str]) -> None:
    assert problems(one_input(text, **spec), f'{{"x": {value}}}') == found


@pytest.mark.parametrize(
    ("text", "spec", "values"),
    [
        ("X INT32 [1]", {}, ["[]", "[1, 2]", "[[1]]", "{}"]),
        ("X FP32 [-1,-1]", {}, ["[[[1]]]", "[1]", "1", "[[1], 2]"]),
        ("X INT32 [1]", {"minimum": 0.5, "maximum": 2.5}, ["0", "3"]),
        ("X INT32 [1]", {"maximum": -0.5}, ["0"]),
        *((f"X {each} [1]", {}, NO_NUMBERS) for each in ("FP32", "INT32", "FP64", "UINT64")),
        ("X BOOL [1]", {}, ["1", '"true"', "0"]),
    ],
    ids=str,
)  # fmt: skip
def test_other_values_are_refused(text: str, spec: dict[str, Any], values: list[str]) -> None:
    p = one_input(text, **spec)
    for value in values:
        assert {name[0] for name in problems(p, f'{{"x": {value}}}')} == {"x"}, value


@pytest.mark.parametrize(
    ("text", "spec", "match"),
    [
        ("X INT32 [-1]", MISSING, "has missing: nan, which only"),
        ("X BOOL [1]", MISSING, "has missing: nan, which only"),
        ("X BYTES [1]", {**MISSING, "kind": "text"}, "has missing: nan, which only"),
        ("X FP32 [2]", {"batch": True}, "max_batch_size is 0"),
        *((f"X BYTES {dims}", {"max_batch_size": 8, "kind": "json"}, ONE_VALUE) for dims in ("[-1]", "[2]", "[1,1]")),
        ("X BYTES [1]", {**BATCHED, "kind": "json"}, ONE_VALUE),
        ("X UINT8 [1]", {"minimum": 256}, "bounds"),
        ("X UINT8 [1]", {"maximum": -1}, "bounds"),
        ("X INT32 [1]", {"minimum": 0.2, "maximum": 0.8}, "bounds"),
        ("X UINT64 [1]", {"maximum": 2**63}, "bounds"),
        ("X UINT64 [1]", {"minimum": 2**63}, "bounds"),
        ("X UINT8 [1]", {"enum": [0.5]}, "enum"),
        ("X UINT8 [1]", {"enum": [300]}, "enum"),
        ("X INT32 [1]", {"default": "5"}, "default"),
        ("X INT32 [1]", {"default": True}, "default"),
        ("X INT32 [1]", {"default": 11, "maximum": 10}, "default"),
        ("X INT8 [1]", {"default": 300}, "default"),
        ("X FP32 [2]", {"default": [1, 2, 3]}, "has shape"),
        ("X FP32 [1]", {"default": 2.0, "enum": [1.0]}, "allowed values"),
        ("X BYTES [1]", {"default": 1}, "default"),
        ("X BYTES [1]", {"kind": "image", "default": "AAE="}, "not an image"),
        ("X BYTES [1]", {"kind": "binary", "default": "?"}, "base64"),
    ],
)  # fmt: skip
def test_a_declaration_that_does_not_fit_is_an_error_at_start(text: str, spec: dict[str, Any], match: str) -> None:
    with pytest.raises((PipelineMismatch, ValidationError), match=match) as caught:
        one_input(text, **spec)
    if isinstance(caught.value, PipelineMismatch) and match != "max_batch_size is 0":
        assert caught.value.location == ("inputs", "x")


@pytest.mark.parametrize(
    ("text", "spec", "array"),
    [
        ("X INT32 [1]", {"default": 5}, [5]),
        ("X FP32 [2]", {"default": [1, 2.5]}, [1, 2.5]),
        ("X BYTES [1]", {"default": "hi"}, [b"hi"]),
        ("X BYTES [1]", {"kind": "json", "default": {"a": [1]}}, [b'{"a":[1]}']),
        ("X BYTES [1]", {"kind": "json", "default": 3}, [b"3"]),
        ("X BYTES [1]", {"kind": "binary", "default": "AAE="}, [b"\0\1"]),
        ("X BOOL [1]", {"default": False}, [False]),
        ("X FP32 [1]", {**MISSING, "default": 1}, [1]),
    ],
)
def test_a_default_is_sent(text: str, spec: dict[str, Any], array: Any) -> None:
    assert sent(one_input(text, **spec), "{}")[1] == array


def test_an_absent_field() -> None:
    for spec in ({}, MISSING):
        assert problems(one_input("X FP32 [1]", **spec), "{}") == {"x": "is required"}
        assert request_of(one_input("X FP32 [1] optional", **spec, optional=True), "{}").inputs == ()
    assert problems(one_input("X FP32 [-1]", **MISSING), "{}") == {"x": "is required"}
    assert request_of(one_input("X INT32 [1] optional", optional=True), '{"x": null}').inputs == ()
    with pytest.raises(InvalidInput, match="'x' is required"):
        one_input("X FP32 [-1]").request_of_form({"x": b"null"})


@pytest.mark.parametrize(("datatype", "one"), [("INT32", "1"), ("FP32", "1.0"), ("UINT64", "1")])
def test_declared_bounds_apply_inside_lists(datatype: str, one: str) -> None:
    p = one_input(f"X {datatype} [-1,-1]", minimum=1, maximum=3)
    assert sent(p, f'{{"x": [[{one}, 3]]}}')[1] == [[1, 3]]
    assert "<= 3" in problems(p, f'{{"x": [[{one}, 4]]}}')["x[0][1]"]
    assert ">= 1" in problems(p, '{"x": [[0]]}')["x[0][0]"]


@pytest.mark.parametrize("datatype", FLOATS)
def test_inexact_floats(datatype: str) -> None:
    assert sent(one_input(f"X {datatype} [-1]", enum=[0.1, 2]), '{"x": [0.1, 2]}')[0] == (2,)
    for padding in ("", LARGE):
        request = request_of(
            one_input(f"X {datatype} [-1,2]", **MISSING), f'{{"x": [[1, null], [null, 2.5]]{padding}}}'
        )
        assert is_nan(request.inputs[0].array) == [[False, True], [True, False]]
        assert np.nansum(request.inputs[0].array.astype(np.float32)) == 3.5


class TestMissingNumbers:
    @pytest.mark.parametrize("body", ['{"x": null}', '{"x": [null]}', f'{{"x": null{LARGE}}}'])
    @pytest.mark.parametrize("more", [{}, {"optional": True}, {"default": 1}], ids=str)
    def test_a_single_number_may_be_missing(self, body: str, more: dict[str, Any]) -> None:
        p = one_input("X FP32 [1] optional", **MISSING, **more)
        assert is_nan(request_of(p, body).inputs[0].array) == [True]

    def test_a_form_may_have_missing_numbers(self) -> None:
        p = pipeline(model(["X FP32 [2]", "Y FP32 [1]"]), inputs={n: {"tensor": n, **MISSING} for n in "XY"})
        request = p.request_of_form({"X": b"[1, null]", "Y": "null"})
        assert [is_nan(each.array) for each in request.inputs] == [[False, True], [True]]

    @pytest.mark.parametrize("more", [{"minimum": 1, "maximum": 2}, {"enum": [1, 2]}])
    def test_missing_numbers_are_within_any_bounds(self, more: dict[str, Any]) -> None:
        p = one_input("X FP32 [-1]", **MISSING, **more)
        assert is_nan(request_of(p, '{"x": [1, null]}').inputs[0].array) == [False, True]

    @pytest.mark.parametrize("body", ['{"x": [1, NaN]}', '{"x": [1, Infinity]}'])
    def test_literals_stay_invalid_json(self, body: str) -> None:
        for padding in ("", LARGE):
            with pytest.raises(InvalidJson):
                request_of(one_input("X FP32 [-1]", **MISSING), body + padding)

    @pytest.mark.parametrize("value", [[1, None], [1, "x"], [None, None]])
    def test_the_schema_allows_null(self, value: list[Any]) -> None:
        schema, body = request_schema(one_input("X FP32 [-1]", **MISSING)), {"x": value}
        assert jsonschema.Draft202012Validator(schema).is_valid(body) is ("x" not in value)
        assert not jsonschema.Draft202012Validator(request_schema(one_input("X FP32 [-1]"))).is_valid(body)


def test_all_inputs_must_have_the_same_number_of_items() -> None:
    p = pipeline(model(["X FP32 [1]", "Y FP32 [1]"], max_batch_size=8), batch=True)
    assert len(request_of(p, '{"X": [1, 2], "Y": [3, 4]}').inputs) == 2
    assert "different numbers" in problems(p, '{"X": [1, 2], "Y": [3]}')["batch"]


class TestParameters:
    @pytest.mark.parametrize(
        ("spec", "value", "given"),
        [
            ({"type": "integer"}, "-3", -3),
            ({"type": "number"}, "3", 3.0),
            ({"type": "number"}, "2.5", 2.5),
            ({"type": "string"}, '"a"', "a"),
            ({"type": "boolean"}, "true", True),
            ({"type": "integer", "enum": [1, 2]}, "2", 2),
            ({"type": "number", "enum": [0.5, 1]}, "1", 1.0),
            ({"type": "string", "enum": ["a"]}, '"a"', "a"),
            ({"type": "integer", "minimum": 1, "maximum": 2}, "2", 2),
            ({"type": "number", "default": 1}, "null", 1.0),
        ],
    )
    def test_a_valid_value_is_sent(self, spec: dict[str, Any], value: str, given: Any) -> None:
        parameters = request_of(one_parameter(**spec), f'{{"p": {value}}}').parameters
        assert parameters == {"p": given}
        assert type(parameters["p"]) is type(given)

    @pytest.mark.parametrize(
        ("spec", "value"),
        [
            ({"type": "integer"}, "true"),
            ({"type": "integer"}, "1.0"),
            ({"type": "integer"}, str(2**63)),
            ({"type": "integer"}, str(-(2**63) - 1)),
            ({"type": "integer", "minimum": 1}, "0"),
            ({"type": "integer", "enum": [1, 2]}, "3"),
            ({"type": "number"}, '"1"'),
            ({"type": "number"}, "1e400"),
            ({"type": "number", "maximum": 1}, "1.5"),
            ({"type": "number", "enum": [0.5]}, "0.6"),
            ({"type": "string"}, "1"),
            ({"type": "string", "enum": ["a"]}, '"b"'),
            ({"type": "boolean"}, "1"),
            ({"tensor": "K FP32 [1]", "type": "number", "enum": [0.5]}, "0.6"),
            ({"tensor": "K INT8 [1]", "type": "integer"}, "300"),
        ],
    )
    @pytest.mark.parametrize("optional", [False, True])
    def test_an_invalid_value_is_reported(self, spec: dict[str, Any], value: str, optional: bool) -> None:
        if "tensor" in spec and optional:
            spec = {**spec, "tensor": f"{spec['tensor']} optional"}
        assert problems(one_parameter(**spec, optional=optional), f'{{"p": {value}}}').keys() == {"p"}

    def test_absent_parameters(self) -> None:
        assert problems(one_parameter(type="integer"), "{}") == {"p": "is required"}
        assert request_of(one_parameter(type="integer", optional=True), "{}").parameters == {}
        assert problems(one_parameter("K FP16 [1]", type="number"), '{"p": 70000}')

    @pytest.mark.parametrize(
        ("spec", "match"),
        [
            ({"type": "integer", "default": "1"}, None),
            ({"type": "integer", "default": 3, "maximum": 2}, None),
            ({"type": "number", "default": 3, "enum": [1, 2]}, None),
            ({"type": "string", "default": 1}, None),
            ({"type": "integer", "enum": [0.5]}, None),
            ({"type": "boolean", "default": 1}, None),
            ({"tensor": "K FP32 [1]", "type": "string"}, "does not fit"),
            ({"tensor": "K BYTES [1]", "type": "integer"}, "does not fit"),
            ({"tensor": "K FP32 [1]", "type": "integer"}, "does not fit"),
            ({"tensor": "K INT32 [1]", "type": "boolean"}, "does not fit"),
            ({"tensor": "K INT32 [2]", "type": "integer"}, "does not fit"),
        ],
    )
    def test_a_declaration_that_does_not_fit_is_an_error_at_start(
        self, spec: dict[str, Any], match: str | None
    ) -> None:
        with pytest.raises(PipelineMismatch, match=match) as caught:
            one_parameter(**spec)
        assert caught.value.location == ("parameters", "p")

    @pytest.mark.parametrize(
        ("tensor", "type_", "value", "array"),
        [
            ("K INT32 [1]", "integer", "7", [7]),
            ("K FP16 [-1]", "number", "0.5", [0.5]),
            ("K BYTES [1]", "string", '"a"', [b"a"]),
            ("K BOOL [1,1]", "boolean", "true", [[True]]),
        ],
    )
    def test_a_parameter_may_be_sent_as_a_tensor(self, tensor: str, type_: str, value: str, array: Any) -> None:
        request = request_of(one_parameter(tensor, type=type_), f'{{"p": {value}}}')
        assert request.parameters == {}
        assert request.inputs[0].array.tolist() == array
        batched = request_of(one_parameter(tensor, 4, type=type_), f'{{"p": {value}}}')
        assert batched.inputs[0].array.tolist() == [array]
