"""Conversion of JSON values to arrays and back, by kind."""

import base64
import io
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.codecs.kinds import (
    IMAGE_MAGIC,
    bytes_of_base64,
    bytes_of_numbers,
    check_image,
    from_array_of,
    kind_fits,
    to_array_of,
)
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, bytes_array
from app.core.model import TensorSpec


def written(kind: str, datatype: str, array: Any) -> Any:
    """Returns the JSON for the caller."""
    return orjson.loads(orjson.dumps(from_array_of(kind, datatype)(array), option=orjson.OPT_SERIALIZE_NUMPY))


class TestNumbers:
    @pytest.mark.parametrize("datatype", sorted(FLOAT_DATATYPES))
    def test_nan_and_infinity_are_null_in_outputs(self, datatype: str) -> None:
        array = np.array([float("nan"), float("inf"), float("-inf"), 1.0], dtype=DTYPE_BY_DATATYPE[datatype])
        assert written("number", datatype, array) == [None, None, None, 1.0]

    def test_memory_order_does_not_change_the_output(self) -> None:
        array = np.arange(6, dtype=np.int32).reshape(2, 3).T
        assert written("number", "INT32", array) == [[0, 3], [1, 4], [2, 5]]


class TestText:
    @given(st.lists(st.text(), max_size=5))
    def test_text_survives_a_round_trip(self, values: list[str]) -> None:
        array = to_array_of("text", BYTES)(values)
        assert array.shape == (len(values),)
        assert written("text", BYTES, array) == values

    def test_invalid_utf_8_becomes_replacement_characters(self) -> None:
        assert written("text", BYTES, bytes_array([b"a\xffb"], (1,))) == ["a\ufffdb"]


class TestJson:
    @pytest.mark.parametrize("value", [{"a": [1, 2]}, [1, [2]], [], "text", 1.5, True, None])
    def test_any_json_is_returned_unchanged(self, value: Any) -> None:
        array = to_array_of("json", BYTES)(orjson.dumps(value))
        assert written("json", BYTES, array.reshape(1)) == [value]
        assert written("json", BYTES, bytes_array([orjson.dumps(value)] * 2, (2, 1))) == [[value], [value]]

    def test_nan_and_infinity_become_null(self) -> None:
        assert written("json", BYTES, bytes_array([b'{"a": NaN, "b": [-Infinity]}'], (1,))) == [
            {"a": None, "b": [None]}
        ]


class TestFiles:
    @given(st.binary())
    def test_base64_and_data_urls_are_decoded(self, content: bytes) -> None:
        text = base64.b64encode(content).decode()
        assert bytes_of_base64(text, "image") == content
        assert bytes_of_base64("data:image/png;charset=x;base64," + text, "image") == content
        assert written("binary", BYTES, bytes_array([content], (1,))) == [text]

    @pytest.mark.parametrize(
        "text",
        [
            "a",
            "ab=",
            "ab==cd==",
            "a b c d",
            "abcd\n",
            "-_-_",
            "äbcd",
            "data:,abcd",
            "data:text/plain,abcd",
            "data:;base64",
        ],
    )
    def test_invalid_base64_is_rejected(self, text: str) -> None:
        with pytest.raises(ValueError, match="base64"):
            bytes_of_base64(text, "binary")

    def test_long_base64_is_decoded_in_pieces(self) -> None:
        content = bytes(range(256)) * 4096
        assert bytes_of_base64(base64.b64encode(content).decode(), "binary") == content

    @pytest.mark.parametrize("padding", ["AA==", "AAA="])
    def test_padding_within_base64_is_rejected(self, padding: str) -> None:
        piece = base64.b64encode(bytes(192 * 1024)).decode()
        with pytest.raises(ValueError, match="is not base64"):
            bytes_of_base64(piece[: -len(padding)] + padding + "AAAA", "binary")

    @pytest.mark.parametrize("media_type", ["text/plain", "application/json", "video/mp4", "text/plain;charset=utf-8"])
    def test_an_image_needs_an_image_media_type(self, media_type: str) -> None:
        url = f"data:{media_type};base64,AAAA"
        with pytest.raises(ValueError, match="media type is not image"):
            bytes_of_base64(url, "image")
        assert bytes_of_base64(url, "binary") == b"\0\0\0"

    @pytest.mark.parametrize("media_type", ["image/png", "IMAGE/JPEG", "application/octet-stream", ""])
    def test_accepted_media_types_of_an_image(self, media_type: str) -> None:
        assert bytes_of_base64(f"data:{media_type};base64,AAAA", "image") == b"\0\0\0"

    @pytest.mark.parametrize("name", sorted(IMAGE_MAGIC))
    def test_image_formats_are_recognized_by_their_first_bytes(self, name: str) -> None:
        start, magic = IMAGE_MAGIC[name]
        check_image(b"\0" * start + magic + b"rest")
        with pytest.raises(ValueError, match="not an image"):
            check_image((b"\0" * start + magic)[:-1])

    def test_images_written_by_pillow_are_recognized(self) -> None:
        for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
            file = io.BytesIO()
            Image.new("RGB", (2, 2)).save(file, form)
            check_image(file.getvalue())

    @pytest.mark.parametrize("content", [b"", b"<svg/>", b"%PDF-1.7", b"\0" * 64, b"RIFF\0\0\0\0WAVE"])
    def test_a_file_that_is_not_an_image_is_rejected(self, content: bytes) -> None:
        with pytest.raises(ValueError, match="not an image"):
            to_array_of("image", BYTES)([content])


@pytest.mark.parametrize("dims", [(1,), (-1, 4), (-1, -1), (-1, -1, -1), (), (-1,), (1, -1), (-1, 1)])
@pytest.mark.parametrize("datatype", sorted(DTYPE_BY_DATATYPE))
def test_texts_and_files_fit_only_bytes_and_8_bit_numbers_with_one_free_dimension(
    datatype: str, dims: tuple[int, ...]
) -> None:
    tensor, is_bytes = TensorSpec("X", datatype, dims), datatype == BYTES
    takes_content = is_bytes or (datatype in {"UINT8", "INT8"} and dims in {(-1,), (1, -1), (-1, 1)})
    assert all(kind_fits(kind, tensor) is takes_content for kind in ("text", "image", "binary"))
    assert (kind_fits("json", tensor), kind_fits("number", tensor)) == (is_bytes, not is_bytes)


@pytest.mark.parametrize("datatype", ["UINT8", "INT8"])
class TestBytesOfNumbers:
    @given(st.binary())
    def test_the_bytes_of_a_file_are_the_numbers(self, datatype: str, content: bytes) -> None:
        array = to_array_of("binary", datatype)(memoryview(content))
        assert (array.dtype, array.tobytes()) == (DTYPE_BY_DATATYPE[datatype], content)
        assert bytes_of_numbers(array, 1).tolist() == [content]
        assert written("binary", datatype, bytes_of_numbers(array, 1)) == [base64.b64encode(content).decode()]

    @given(st.text())
    def test_a_text_is_its_utf_8(self, datatype: str, text: str) -> None:
        array = to_array_of("text", datatype)(text)
        assert written("text", datatype, bytes_of_numbers(array, 1)) == [text]

    def test_a_file_is_not_copied(self, datatype: str) -> None:
        content = bytearray(b"12")
        array = to_array_of("binary", datatype)(memoryview(content))
        content[0] = 57
        assert array.tobytes() == b"92"

    @pytest.mark.parametrize(
        ("shape", "rank", "expected"),
        [((3,), 1, [b"abc"]), ((1, 3), 1, [[b"abc"]]), ((1, 3), 2, [b"abc"]), ((3, 1), 1, [[b"a"], [b"b"], [b"c"]])],
    )
    def test_each_row_is_one_file(self, datatype: str, shape: tuple[int, ...], rank: int, expected: Any) -> None:
        array = np.frombuffer(b"abc", DTYPE_BY_DATATYPE[datatype]).reshape(shape)
        assert bytes_of_numbers(array, rank).tolist() == expected

    def test_rows_without_numbers_are_empty_files(self, datatype: str) -> None:
        empty = np.empty((2, 0), DTYPE_BY_DATATYPE[datatype])
        assert bytes_of_numbers(empty, 1).tolist() == [[b""], [b""]]
        assert bytes_of_numbers(empty[:0], 1).shape == (0, 1)
