"""Input fields: shapes, single values, batches, defaults, enums and bounds."""

from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError

from app.core.errors import InvalidInput, InvalidJson
from app.core.inference import InferenceRequest
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import request_schema
from tests.toolkit.models import model, pipeline


def one_input(text: str, max_batch_size: int = 0, *, batch: bool = False, **spec: Any) -> Pipeline:
    """Returns a pipeline with one input ``x`` for the tensor that ``text`` describes."""
    kind = {} if "BYTES" not in text or "kind" in spec else {"kind": "text"}
    config = model(text, max_batch_size=max_batch_size)
    return pipeline(config, inputs={"x": {"tensor": text.partition(" ")[0], **kind, **spec}}, batch=batch)


def one_parameter(tensor: str | None = None, max_batch_size: int = 0, **spec: Any) -> Pipeline:
    config = model([] if tensor is None else tensor, max_batch_size=max_batch_size)
    return pipeline(
        config, inputs={}, parameters={"p": {**spec, **({"tensor": tensor.partition(" ")[0]} if tensor else {})}}
    )


def request_of(p: Pipeline, body: str) -> InferenceRequest:
    return p.request_of_json(body.encode())


def sent(p: Pipeline, body: str) -> Any:
    array = request_of(p, body).inputs[0].array
    return array.shape, array.tolist()


def problems(p: Pipeline, body: str) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        request_of(p, body)
    return {found.field: found.problem for found in caught.value.errors}


class TestShapes:
    def test_lists_nest_by_shape(self) -> None:
        assert sent(one_input("X FP32 [-1,2]"), '{"x": [[1, 2], [3, 4.5]]}') == ((2, 2), [[1, 2], [3, 4.5]])

    @pytest.mark.parametrize("body", ['{"x": 7}', '{"x": [7]}'])
    def test_a_single_element_may_be_bare_or_in_a_list(self, body: str) -> None:
        assert sent(one_input("X INT32 [1]"), body) == ((1,), [7])

    def test_a_tensor_without_dimensions_is_a_bare_value(self) -> None:
        assert sent(one_input("X INT32 []"), '{"x": 7}') == ((), 7)

    @pytest.mark.parametrize("body", ['{"x": []}', '{"x": [1, 2]}', '{"x": [[1]]}', '{"x": {}}'])
    def test_a_single_value_rejects_other_json(self, body: str) -> None:
        assert problems(one_input("X INT32 [1]"), body).keys() <= {"x", "x[0]"}

    def test_a_variable_dimension_always_needs_a_list(self) -> None:
        p = one_input("X INT32 [-1]")
        assert sent(p, '{"x": [7]}') == ((1,), [7])
        assert "must be a list" in problems(p, '{"x": 7}')["x"]

    def test_an_empty_list_keeps_the_declared_rank(self) -> None:
        assert sent(one_input("X FP32 [-1,4,2]"), '{"x": []}')[0] == (0, 4, 2)
        assert sent(one_input("X FP32 [-1,-1]"), '{"x": []}')[0] == (0, 0)
        assert sent(one_input("X FP32 [-1,-1]"), '{"x": [[], []]}')[0] == (2, 0)

    @pytest.mark.parametrize(
        ("dims", "body", "problem"),
        [
            ("[3]", '{"x": [1, 2]}', "has shape [2]; expected [3]"),
            ("[3]", '{"x": []}', "has shape [0]; expected [3]"),
            ("[-1,2]", '{"x": [[1, 2, 3]]}', "has shape [1,3]; expected [-1,2]"),
            ("[2,3]", '{"x": []}', "has shape [0,3]; expected [2,3]"),
            ("[-1,-1]", '{"x": [[1], [2, 3]]}', "has lists of different lengths"),
        ],
    )
    def test_another_shape_is_rejected(self, dims: str, body: str, problem: str) -> None:
        assert problems(one_input(f"X FP32 {dims}"), body) == {"x": problem}

    @pytest.mark.parametrize("body", ['{"x": [[[1]]]}', '{"x": [1]}', '{"x": 1}', '{"x": [[1], 2]}'])
    def test_another_rank_is_rejected(self, body: str) -> None:
        assert problems(one_input("X FP32 [-1,-1]"), body)

    def test_text_in_two_dimensions(self) -> None:
        assert sent(one_input("X BYTES [-1,2]"), '{"x": [["a", "b"]]}') == ((1, 2), [[b"a", b"b"]])
        assert problems(one_input("X BYTES [-1,2]"), '{"x": [["a"], ["b", "c"]]}') == {
            "x": "has lists of different lengths"
        }


class TestMissingNumbers:
    @pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
    @pytest.mark.parametrize("padding", ["", " " * 70_000], ids=["small", "large"])
    def test_null_is_nan_where_missing_is_declared(self, datatype: str, padding: str) -> None:
        array = request_of(
            one_input(f"X {datatype} [-1,2]", missing="nan"), f'{{"x": [[1, null], [null, 2.5]]{padding}}}'
        )
        assert np.isnan(array.inputs[0].array.astype(np.float32)).tolist() == [[False, True], [True, False]]
        assert np.nansum(array.inputs[0].array.astype(np.float32)) == 3.5

    @pytest.mark.parametrize("padding", ["", " " * 70_000], ids=["small", "large"])
    def test_null_is_refused_where_missing_is_not_declared(self, padding: str) -> None:
        assert problems(one_input("X FP32 [-1]"), f'{{"x": [1, null]{padding}}}') == {
            "x[1]": "must be a number, not null"
        }

    @pytest.mark.parametrize("body", ['{"x": null}', '{"x": [null]}', f'{{"x": null{" " * 70_000}}}'])
    @pytest.mark.parametrize("more", [{}, {"optional": True}, {"default": 1}], ids=str)
    def test_a_single_number_may_be_missing(self, body: str, more: dict[str, Any]) -> None:
        p = one_input("X FP32 [1] optional", missing="nan", **more)
        assert np.isnan(request_of(p, body).inputs[0].array).tolist() == [True]

    def test_an_absent_number_is_not_a_missing_number(self) -> None:
        assert problems(one_input("X FP32 [1]", missing="nan"), "{}") == {"x": "is required"}
        assert sent(one_input("X FP32 [1]", missing="nan", default=1), "{}") == ((1,), [1])
        assert request_of(one_input("X FP32 [1] optional", missing="nan", optional=True), "{}").inputs == ()

    @pytest.mark.parametrize("body", ['{"x": null}', "{}", f'{{"x": null{" " * 70_000}}}'])
    def test_null_for_a_list_means_absent(self, body: str) -> None:
        assert problems(one_input("X FP32 [-1]", missing="nan"), body) == {"x": "is required"}

    def test_a_form_may_have_missing_numbers(self) -> None:
        p = pipeline(model(["X FP32 [2]", "Y FP32 [1]"]), inputs={n: {"tensor": n, "missing": "nan"} for n in "XY"})
        request = p.request_of_form({"X": b"[1, null]", "Y": "null"})
        assert [np.isnan(each.array).tolist() for each in request.inputs] == [[False, True], [True]]

    def test_missing_numbers_are_within_any_bounds(self) -> None:
        p = one_input("X FP32 [-1]", missing="nan", minimum=1, maximum=2)
        assert np.isnan(request_of(p, '{"x": [1, null]}').inputs[0].array).tolist() == [False, True]
        assert problems(p, '{"x": [null, 0]}') == {"x[1]": "must be a number >= 1.0"}
        p = one_input("X FP32 [-1]", missing="nan", enum=[1, 2])
        assert np.isnan(request_of(p, '{"x": [1, null]}').inputs[0].array).tolist() == [False, True]
        assert problems(p, '{"x": [null, 0]}') == {"x": "is not one of the allowed values"}

    @pytest.mark.parametrize("body", ['{"x": [1, NaN]}', '{"x": [1, Infinity]}'])
    def test_literals_stay_invalid_json(self, body: str) -> None:
        with pytest.raises(InvalidJson):
            request_of(one_input("X FP32 [-1]", missing="nan"), body)
        with pytest.raises(InvalidJson):
            request_of(one_input("X FP32 [-1]", missing="nan"), body + " " * 70_000)

    def test_a_number_out_of_range_beside_a_missing_one_is_refused(self) -> None:
        p = one_input("X FP32 [-1]", missing="nan")
        assert problems(p, '{"x": [null, 1e39]}') == {"x": "holds a number out of the range of FP32"}

    @pytest.mark.parametrize(
        ("text", "more"), [("X INT32 [-1]", {}), ("X BOOL [1]", {}), ("X BYTES [1]", {"kind": "text"})]
    )
    def test_only_floats_can_be_missing(self, text: str, more: dict[str, Any]) -> None:
        with pytest.raises((PipelineMismatch, ValidationError), match="has missing: nan, which only"):
            one_input(text, missing="nan", **more)

    @pytest.mark.parametrize("value", [[1, None], [1, "x"], [None, None]])
    def test_the_schema_allows_null(self, value: list[Any]) -> None:
        p = one_input("X FP32 [-1]", missing="nan")
        schema, body = request_schema(p), {"x": value}
        assert jsonschema.Draft202012Validator(schema).is_valid(body) is ("x" not in value)
        assert not jsonschema.Draft202012Validator(request_schema(one_input("X FP32 [-1]"))).is_valid(body)


def test_null_in_a_form_is_an_absent_field() -> None:
    with pytest.raises(InvalidInput, match="'x' is required"):
        one_input("X FP32 [-1]").request_of_form({"x": b"null"})


class TestBatch:
    def test_the_batch_dimension_is_added(self) -> None:
        assert sent(one_input("X FP32 [2]", 8), '{"x": [1, 2]}') == ((1, 2), [[1, 2]])
        assert sent(one_input("X BYTES [1]", 8), '{"x": "a"}') == ((1, 1), [[b"a"]])

    def test_with_batch_the_caller_sends_a_list_of_items(self) -> None:
        assert sent(one_input("X FP32 [2]", 8, batch=True), '{"x": [[1, 2], [3, 4]]}') == ((2, 2), [[1, 2], [3, 4]])

    def test_items_of_one_element_are_bare_values(self) -> None:
        assert sent(one_input("X BYTES [1]", 8, batch=True), '{"x": ["a", "b"]}') == ((2, 1), [[b"a"], [b"b"]])

    @pytest.mark.parametrize(("count", "expected"), [(0, "has 0 items"), (4097, "has 4097 items; expected 1 to 4096")])
    def test_the_number_of_items_is_limited(self, count: int, expected: str) -> None:
        p = one_input("X FP32 [2]", 8, batch=True)
        assert problems(p, f'{{"x": {[[0, 0]] * count}}}')["batch"].startswith(expected)

    def test_max_items_is_another_limit(self) -> None:
        p = pipeline(model("X FP32 [2]", max_batch_size=8), batch={"max_items": 9})
        assert request_of(p, f'{{"X": {[[0, 0]] * 9}}}').inputs[0].shape == (9, 2)
        assert problems(p, f'{{"X": {[[0, 0]] * 10}}}') == {"batch": "has 10 items; expected 1 to 9"}

    def test_all_inputs_must_have_the_same_number_of_items(self) -> None:
        config = model(["X FP32 [1]", "Y FP32 [1]"], max_batch_size=8)
        p = pipeline(config, batch=True)
        assert len(request_of(p, '{"X": [1, 2], "Y": [3, 4]}').inputs) == 2
        assert "different numbers" in problems(p, '{"X": [1, 2], "Y": [3]}')["batch"]

    def test_a_parameter_is_repeated_for_every_item(self) -> None:
        config = model(["X FP32 [1]", "K INT32 [1]"], max_batch_size=8)
        p = pipeline(config, batch=True, parameters={"k": {"type": "integer", "tensor": "K"}})
        request = request_of(p, '{"X": [1, 2, 3], "k": 5}')
        assert request.inputs[1].array.tolist() == [[5], [5], [5]]

    def test_batch_needs_a_model_with_a_batch_dimension(self) -> None:
        with pytest.raises(PipelineMismatch, match="max_batch_size is 0"):
            one_input("X FP32 [2]", batch=True)


class TestAbsence:
    def test_an_absent_required_field_is_reported(self) -> None:
        p = one_input("X INT32 [1]")
        assert problems(p, "{}") == {"x": "is required"}
        assert problems(p, '{"x": null}') == {"x": "is required"}

    @pytest.mark.parametrize("body", ["{}", '{"x": null}'])
    def test_an_optional_field_is_not_sent(self, body: str) -> None:
        assert request_of(one_input("X INT32 [1] optional", optional=True), body).inputs == ()

    @pytest.mark.parametrize(
        ("tensor", "spec", "array"),
        [
            ("X INT32 [1]", {"default": 5}, [5]),
            ("X FP32 [2]", {"default": [1, 2.5]}, [1, 2.5]),
            ("X BYTES [1]", {"default": "hi"}, [b"hi"]),
            ("X BYTES [1]", {"kind": "json", "default": {"a": [1]}}, [b'{"a":[1]}']),
            ("X BYTES [1]", {"kind": "json", "default": 3}, [b"3"]),
            ("X BYTES [1]", {"kind": "binary", "default": "AAE="}, [b"\0\1"]),
            ("X BOOL [1]", {"default": False}, [False]),
        ],
    )
    def test_a_default_is_sent(self, tensor: str, spec: dict[str, Any], array: Any) -> None:
        assert sent(one_input(tensor, **spec), "{}")[1] == array

    def test_null_means_the_default(self) -> None:
        assert sent(one_input("X INT32 [1]", default=5), '{"x": null}')[1] == [5]

    @pytest.mark.parametrize(
        ("tensor", "spec"),
        [
            ("X INT32 [1]", {"default": "5"}),
            ("X INT32 [1]", {"default": True}),
            ("X INT32 [1]", {"default": 11, "maximum": 10}),
            ("X INT8 [1]", {"default": 300}),
            ("X FP32 [2]", {"default": [1, 2, 3]}),
            ("X FP32 [1]", {"default": 2.0, "enum": [1.0]}),
            ("X BYTES [1]", {"default": 1}),
            ("X BYTES [1]", {"kind": "image", "default": "AAE="}),
            ("X BYTES [1]", {"kind": "binary", "default": "?"}),
        ],
    )
    def test_an_invalid_default_is_an_error_at_start(self, tensor: str, spec: dict[str, Any]) -> None:
        with pytest.raises(PipelineMismatch) as caught:
            one_input(tensor, **spec)
        assert caught.value.location == ("inputs", "x")

    @pytest.mark.parametrize(("dims", "batch"), [("[-1]", False), ("[2]", False), ("[1,1]", False), ("[1]", True)])
    def test_json_needs_a_tensor_with_one_element(self, dims: str, batch: bool) -> None:
        with pytest.raises(PipelineMismatch, match=r"one value: the tensor must have dims \[1\]") as caught:
            one_input(f"X BYTES {dims}", 8, kind="json", batch=batch)
        assert caught.value.location == ("inputs", "x")

    def test_null_is_a_value_of_json(self) -> None:
        assert sent(one_input("X BYTES [1]", kind="json"), '{"x": null}')[1] == [b"null"]


class TestBounds:
    @pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64"])
    def test_values_are_limited_by_the_datatype(self, datatype: str) -> None:
        limits = np.iinfo(np.dtype(datatype.lower()))
        p = one_input(f"X {datatype} [-1]")
        assert sent(p, f'{{"x": [{limits.min}, {limits.max}]}}')[1] == [limits.min, limits.max]
        assert problems(p, f'{{"x": [{int(limits.min) - 1}]}}')
        assert problems(p, f'{{"x": [{int(limits.max) + 1}]}}')

    @pytest.mark.parametrize(("datatype", "one"), [("INT32", "1"), ("FP32", "1.0"), ("UINT64", "1")])
    def test_declared_bounds_apply_inside_lists(self, datatype: str, one: str) -> None:
        p = one_input(f"X {datatype} [-1,-1]", minimum=1, maximum=3)
        assert sent(p, f'{{"x": [[{one}, 3]]}}')[1] == [[1, 3]]
        assert "<= 3" in problems(p, f'{{"x": [[{one}, 4]]}}')["x[0][1]"]
        assert ">= 1" in problems(p, '{"x": [[0]]}')["x[0][0]"]

    def test_bounds_between_integers_round_inwards(self) -> None:
        p = one_input("X INT32 [1]", minimum=0.5, maximum=2.5)
        assert problems(p, '{"x": 0}')
        assert problems(p, '{"x": 3}')
        assert sent(p, '{"x": 1}')[1] == [1]
        assert problems(one_input("X INT32 [1]", maximum=-0.5), '{"x": 0}')

    @pytest.mark.parametrize(
        ("datatype", "spec"),
        [
            ("UINT8", {"minimum": 256}),
            ("UINT8", {"maximum": -1}),
            ("INT32", {"minimum": 0.2, "maximum": 0.8}),
            ("UINT64", {"maximum": 2**63}),
            ("UINT64", {"minimum": 2**63}),
        ],
    )
    def test_impossible_bounds_are_an_error_at_start(self, datatype: str, spec: dict[str, Any]) -> None:
        with pytest.raises(PipelineMismatch, match="bounds"):
            one_input(f"X {datatype} [1]", **spec)


class TestEnums:
    def test_an_enum_of_integers(self) -> None:
        p = one_input("X UINT8 [-1]", enum=[1, 2])
        assert sent(p, '{"x": [1, 2]}')[1] == [1, 2]
        assert problems(p, '{"x": [3]}') == {"x[0]": "is not one of the allowed values"}

    @pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
    def test_an_enum_of_inexact_floats(self, datatype: str) -> None:
        p = one_input(f"X {datatype} [-1]", enum=[0.1, 2])
        assert sent(p, '{"x": [0.1, 2]}')[0] == (2,)
        assert problems(p, '{"x": [0.1, 0.2]}') == {"x": "is not one of the allowed values"}

    def test_an_enum_of_texts(self) -> None:
        p = one_input("X BYTES [1]", enum=["a", "b'`"])
        assert sent(p, '{"x": "b\'`"}')[1] == [b"b'`"]
        assert problems(p, '{"x": "<secret>"}') == {"x": "is not one of the allowed values"}

    @pytest.mark.parametrize("enum", [[0.5], [300]])
    def test_an_enum_outside_the_datatype_is_an_error_at_start(self, enum: list[Any]) -> None:
        with pytest.raises(PipelineMismatch, match="enum"):
            one_input("X UINT8 [1]", enum=enum)


class TestTypes:
    @pytest.mark.parametrize("value", ["true", '"1"', "null", "{}", "[true]", '["1"]', "1e400", "1" * 400])
    @pytest.mark.parametrize("datatype", ["FP32", "INT32", "FP64", "UINT64"])
    def test_invalid_numbers_are_rejected(self, datatype: str, value: str) -> None:
        assert problems(one_input(f"X {datatype} [1]"), f'{{"x": {value}}}')

    @pytest.mark.parametrize("value", ["1", '"true"', "0"])
    def test_invalid_booleans_are_rejected(self, value: str) -> None:
        assert problems(one_input("X BOOL [1]"), f'{{"x": {value}}}')

    @pytest.mark.parametrize("value", ["1.0", "1e3", "1.5"])
    def test_a_float_is_not_an_integer(self, value: str) -> None:
        assert problems(one_input("X INT32 [1]"), f'{{"x": {value}}}') == {
            "x": "must be an integer or a list, not a decimal number"
        }

    def test_an_integer_is_accepted_as_a_float(self) -> None:
        assert sent(one_input("X FP32 [1]"), '{"x": 3}')[1] == [3.0]

    @pytest.mark.parametrize(("datatype", "value"), [("FP16", "65520"), ("BF16", "3.4e38"), ("FP32", "-3.5e38")])
    def test_a_number_that_would_overflow_is_rejected(self, datatype: str, value: str) -> None:
        assert problems(one_input(f"X {datatype} [1]"), f'{{"x": {value}}}') == {
            "x": f"holds a number out of the range of {datatype}"
        }

    def test_an_image_is_base64_with_the_bytes_of_an_image(self) -> None:
        p = one_input("X BYTES [1]", kind="image")
        assert sent(p, '{"x": "iVBORw0KGgo="}')[1] == [b"\x89PNG\r\n\x1a\n"]
        assert "not an image" in problems(p, '{"x": "AAAA"}')["x"]
        assert problems(p, '{"x": "?"}') == {"x": "is not base64"}

    def test_a_list_of_files(self) -> None:
        p = one_input("X BYTES [-1]", kind="binary")
        assert sent(p, '{"x": ["AAE=", ""]}')[1] == [b"\0\1", b""]

    def test_json_is_sent_unchanged(self) -> None:
        p = one_input("X BYTES [1]", kind="json")
        assert sent(p, '{"x": {"a": [1, {"b": null}]}}')[1] == [b'{"a": [1, {"b": null}]}']


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
        ],
    )
    @pytest.mark.parametrize("optional", [False, True])
    def test_an_invalid_value_is_reported(self, spec: dict[str, Any], value: str, optional: bool) -> None:
        assert problems(one_parameter(**spec, optional=optional), f'{{"p": {value}}}').keys() == {"p"}

    def test_absent_parameters(self) -> None:
        assert problems(one_parameter(type="integer"), "{}") == {"p": "is required"}
        assert request_of(one_parameter(type="integer", optional=True), "{}").parameters == {}
        assert request_of(one_parameter(type="number", default=1), '{"p": null}').parameters == {"p": 1.0}

    @pytest.mark.parametrize(
        "spec",
        [
            {"type": "integer", "default": "1"},
            {"type": "integer", "default": 3, "maximum": 2},
            {"type": "number", "default": 3, "enum": [1, 2]},
            {"type": "string", "default": 1},
            {"type": "integer", "enum": [0.5]},
            {"type": "boolean", "default": 1},
        ],
    )
    def test_contradictory_keys_are_an_error_at_start(self, spec: dict[str, Any]) -> None:
        with pytest.raises(PipelineMismatch) as caught:
            one_parameter(**spec)
        assert caught.value.location == ("parameters", "p")

    @pytest.mark.parametrize(
        ("tensor", "spec", "value", "array"),
        [
            ("K INT32 [1]", {"type": "integer"}, "7", [7]),
            ("K FP16 [-1]", {"type": "number"}, "0.5", [0.5]),
            ("K BYTES [1]", {"type": "string"}, '"a"', [b"a"]),
            ("K BOOL [1,1]", {"type": "boolean"}, "true", [[True]]),
        ],
    )
    def test_a_parameter_may_be_sent_as_a_tensor(
        self, tensor: str, spec: dict[str, Any], value: str, array: Any
    ) -> None:
        request = request_of(one_parameter(tensor, **spec), f'{{"p": {value}}}')
        assert request.parameters == {}
        assert request.inputs[0].array.tolist() == array
        assert request_of(one_parameter(tensor, 4, **spec), f'{{"p": {value}}}').inputs[0].array.tolist() == [array]

    def test_a_parameter_sent_as_a_tensor_is_checked(self) -> None:
        assert problems(one_parameter("K FP32 [1]", type="number", enum=[0.5]), '{"p": 0.6}')
        assert problems(one_parameter("K INT8 [1]", type="integer"), '{"p": 300}')
        assert problems(one_parameter("K FP16 [1]", type="number"), '{"p": 70000}')

    @pytest.mark.parametrize(
        ("tensor", "type_"),
        [
            ("K FP32 [1]", "string"),
            ("K BYTES [1]", "integer"),
            ("K FP32 [1]", "integer"),
            ("K INT32 [1]", "boolean"),
            ("K INT32 [2]", "integer"),
        ],
    )
    def test_a_tensor_of_another_type_is_an_error_at_start(self, tensor: str, type_: str) -> None:
        with pytest.raises(PipelineMismatch, match="does not fit"):
            one_parameter(tensor, type=type_)
