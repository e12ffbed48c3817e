"""Malformed, hostile and invalid bodies: the error names all problems and never repeats input."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import GatewayError, InvalidInput, InvalidJson, InvalidRequest
from app.pipelines.body import FilePart
from tests.toolkit.models import model, pipeline

CONFIG = model(["X FP32 [-1]", "NOTE BYTES [1]", "DOC BYTES [1] optional", "FILE BYTES [1] optional"])


P = pipeline(
    CONFIG,
    inputs={
        "x": {"tensor": "X"},
        "note": {"tensor": "NOTE", "kind": "text"},
        "doc": {"tensor": "DOC", "kind": "json", "optional": True},
        "image": {"tensor": "FILE", "kind": "image", "optional": True},
    },
    parameters={"n": {"type": "integer", "default": 1}, "t": {"type": "number", "optional": True}},
)
GOOD = {"x": [1.0], "note": "hi"}
PNG = b"\x89PNG\r\n\x1a\n"
ALL_FIELDS = "doc, image, n, note, t, x"
NO_IMAGE = "is not an image of a known format (PNG, JPEG, GIF, WebP, BMP or TIFF)"
NO_NAN = "The body is not JSON: NaN and Infinity are not JSON; use null for a missing number"
HALF_A_PAIR = "The body is not JSON: it ends too early, or a text has half of a surrogate pair."
UNKNOWN = "is not a field of this pipeline; "


def refusal(body: bytes) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        P.request_of_json(body)
    return caught.value


def body(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


class TestMalformedJson:
    @pytest.mark.parametrize(
        "text",
        [
            b" ",
            b"{",
            b'{"x": [1',
            b'{"x": [1]}, 2',
            b"{x: 1}",
            b'{"x": [1],}',
            b'{"x": 01}',
            b'{"note": "\x01", "x": []}',
            b'{"note": "\xff", "x": []}',
            b'{"note": "\\x41", "x": []}',
            b"\xef\xbb\xbf{}",
            '{"note": "a", "x": []}'.encode("utf-16"),
            '{"note": "a", "x": []}'.encode("utf-32-le"),
            b"x=1&note=hi",
            b"\0",
        ],
    )
    def test_malformed_json_is_invalid_json(self, text: bytes) -> None:
        assert type(refusal(text)) is InvalidJson

    @pytest.mark.parametrize(
        ("text", "detail"),
        [
            (b'{"note": "\\ud800"}', HALF_A_PAIR),
            (b'{"note": "a', HALF_A_PAIR),
            (b"", "The body is empty. Send a JSON object with 'x' and 'note'."),
            (b'{"note": secret}', "The body is not JSON: invalid character (byte 9)."),
            (b'{"x": [1, -Infinity]}', f"{NO_NAN} (byte 11)."),
            (b'{"x": [NaN]}', f"{NO_NAN} (byte 7)."),
            (b"{'x': [1]}", "The body is not JSON: write names and texts in double quotes (byte 1)."),
            (b"[" * 200_000, "The body has too many nested levels: more than 64 levels."),
        ],
    )
    def test_the_error_says_where_but_not_what(self, text: bytes, detail: str) -> None:
        error = refusal(text)
        assert (type(error), error.detail) == (InvalidJson, detail)

    @pytest.mark.parametrize("text", [b"[]", b"1", b"null", b'"x"', b"true", b"[{}]"])
    def test_json_that_is_not_an_object_is_an_invalid_request(self, text: bytes) -> None:
        assert type(refusal(text)) is InvalidRequest

    @pytest.mark.parametrize("where", ["x", "note", "doc", "image", "n", "unknown"])
    @pytest.mark.parametrize("bomb", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000])
    def test_deeply_nested_fields_are_invalid_json(self, where: str, bomb: str) -> None:
        assert type(refusal(f'{{"{where}": {bomb}}}'.encode())) is InvalidJson

    @pytest.mark.parametrize(
        "text",
        [
            b'{"x": [1], "note": 1, "note": "b"}',
            b'{"x": [1], "note": "a", "note": "b"}',
            b'{"x": [1], "note": "a:", "note": "b"}',
            b'{"x": [1], "note": "a", "n\\u006fte": "b"}',
            b'{"x": [1], "note": null, "note": "b"}',
        ],
    )
    def test_the_error_names_a_key_given_twice(self, text: bytes) -> None:
        error = refusal(text)
        assert type(error) is InvalidInput
        assert ("note", "is given twice") in [(found.field, found.problem) for found in error.errors]

    @pytest.mark.parametrize("note", ['"note": ":"', "note", "a: b: c", '\\u0041: "x"'])
    def test_text_that_looks_like_a_key_is_accepted(self, note: str) -> None:
        assert P.request_of_json(body(note=note)).inputs[1].array.tolist() == [note.encode()]


class TestFields:
    @pytest.mark.parametrize(
        ("text", "field", "problem"),
        [
            (body(nota="x"), "nota", UNKNOWN + "did you mean 'note'?"),
            (body(zzz=None), "zzz", f"{UNKNOWN}valid here: {ALL_FIELDS}"),
            (body(**{"\r\nX: \0" + "y" * 1000: 1}), "??X: ?" + "y" * 58, f"{UNKNOWN}valid here: {ALL_FIELDS}"),
            *(
                (body(**{name: 1}), name, f"{UNKNOWN}valid here: {ALL_FIELDS}")
                for name in ("early_exit", "triton_enable_empty_final_response", "__proto__", "")
            ),
            (b'{"x": [], "note": "", "doc": {"a": "\xff"}}', "doc", "is not UTF-8 text"),
        ],
    )
    def test_a_wrong_or_reserved_field_is_named(self, text: bytes, field: str, problem: str) -> None:
        error = refusal(text)
        assert [(found.field, found.problem) for found in error.errors] == [(field, problem)]
        assert error.detail.removesuffix(".") == f"'{field}' {problem}"

    def test_at_most_eight_problems_are_listed(self) -> None:
        error = refusal(body(**{f"f{index}": index for index in range(1000)}))
        assert [found.field for found in error.errors] == [f"f{index}" for index in range(8)]

    @pytest.mark.parametrize("name", ["x", "note", "n", "zzz"])
    @pytest.mark.parametrize("form", ['{"%s": [""%s]}', '{"%s": ""%s}'], ids=["list", "repeated"])
    def test_a_large_body_has_at_most_eight_problems(self, name: str, form: str) -> None:
        more = (', ""' if "[" in form else f', "{name}": ""') * 100_000
        assert 1 <= len(refusal((form % (name, more)).encode()).errors) <= 8

    def test_all_problems_are_reported_together(self) -> None:
        error = refusal(b'{"x": ["a"], "zzz": 1, "n": 1.5}')
        assert {found.field: found.problem for found in error.errors} == {
            "zzz": f"is not a field of this pipeline; valid here: {ALL_FIELDS}",
            "note": "is required",
            "x[0]": "must be a number, not a string",
            "n": "must be an integer, not a decimal number",
        }
        assert "(3 more)" in error.detail

    @pytest.mark.parametrize("number", ["1e400", "-1e999", "9" * 400, "1" * 5000])
    def test_a_number_beyond_floats_is_out_of_range(self, number: str) -> None:
        error = refusal(f'{{"x": [0, {number}], "note": ""}}'.encode())
        assert [(found.field, found.problem) for found in error.errors] == [("x[1]", "is out of range")]

    @pytest.mark.parametrize("value", [True, "1", None, [1], {"a": 1}])
    def test_the_error_names_the_position_of_an_invalid_number(self, value: Any) -> None:
        assert refusal(body(x=[value])).errors[0].field == "x[0]"

    def test_errors_do_not_repeat_the_input(self) -> None:
        secret = "s3cret" * 100
        for fields in ({"x": secret}, {"x": [secret]}, {"n": secret}, {"image": secret + "?"}, {"note": {secret: 1}}):
            error = refusal(body(**fields))
            assert "s3cret" not in repr((error.detail, error.hint, error.errors))


class TestForms:
    def test_every_kind_can_be_a_form_field(self) -> None:
        request = P.request_of_form(
            {"x": "[1, 2]", "note": '"quoted" \0', "doc": '{"a": 1}', "image": PNG, "n": "7", "t": "0.5"}
        )
        assert [tensor.array.tolist() for tensor in request.inputs] == [
            [1.0, 2.0],
            [b'"quoted" \0'],
            [b'{"a": 1}'],
            [PNG],
        ]
        assert request.parameters == {"n": 7, "t": 0.5}
        request = P.request_of_form({"x": b"[1]", "note": "\u00fc".encode(), "doc": b"[]"})
        assert [tensor.array.tolist() for tensor in request.inputs] == [[1.0], ["\u00fc".encode()], [b"[]"]]

    @pytest.mark.parametrize(
        ("field", "part", "problem"),
        [
            ("x", "[1, 2", "is not JSON"),
            ("x", "[NaN]", "is not JSON"),
            ("x", "1", "must be a list, not an integer"),
            ("doc", "[" * 100_000, "is not JSON"),
            ("x", b"\xff", "is not JSON"),
            ("x", "\ud800", "is not UTF-8 text"),
            ("note", b"\xff", "is not UTF-8 text"),
            ("note", "a\ud800", "holds half a surrogate pair"),
            ("doc", "{", "is not JSON"),
            ("doc", b'"\xff"', "is not UTF-8 text"),
            ("image", b"sign.png", f"{NO_IMAGE}; curl sends a file with -F image=@FILE"),
            ("image", FilePart(b"sign.png"), NO_IMAGE),
            ("image", "iVBORw0KGgo=", NO_IMAGE),
            ("image", "\ud800", "is not UTF-8 text"),
            ("n", "1.5", "must be an integer, not a string"),
            ("n", "", "must be an integer, not a string"),
            ("n", "\u0663", "must be an integer, not a string"),
            ("n", b"\xff", "is not UTF-8 text"),
            ("t", "nan", "must be a finite number"),
            ("t", "Infinity", "must be a finite number"),
            ("t", "1e999", "is out of range"),
            ("zzz", "1", f"is not a field of this pipeline; valid here: {ALL_FIELDS}"),
            ("x", None, "is required"),
        ],
    )
    def test_problems_are_reported(self, field: str, part: str | bytes | None, problem: str) -> None:
        parts = {"x": "[1]", "note": "hi", field: part}
        with pytest.raises(InvalidInput) as caught:
            P.request_of_form({name: value for name, value in parts.items() if value is not None})
        assert [(found.field, found.problem) for found in caught.value.errors] == [(field, problem)]

    def test_a_file_for_a_text_input_gets_a_hint(self) -> None:
        with pytest.raises(InvalidInput) as caught:
            P.request_of_form({"x": b"[1]", "note": b"\x89PNG\r\n"})
        assert caught.value.hint == (
            "If 'note' is a file, declare `kind: image` or `kind: binary` for it in gateway.yaml."
        )
        with pytest.raises(InvalidInput) as caught:
            P.request_of_form({"x": b"[1]", "note": "hi", "image": "\ud800"})
        assert caught.value.hint is None


@given(st.dictionaries(st.sampled_from(["x", "note", "doc", "image", "n", "t", "zz"]), st.text() | st.binary()))
def test_any_form_is_a_request_or_a_client_error(parts: dict[str, str | bytes]) -> None:
    with suppress(InvalidInput):
        P.request_of_form(parts)
