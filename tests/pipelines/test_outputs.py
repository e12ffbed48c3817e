"""Output fields: shapes, single values, batches, and tensors that do not match their declaration."""

from typing import Any

import numpy as np
import orjson
import pytest

from app.core.errors import ContractViolation
from app.core.inference import Tensor, bytes_array
from app.pipelines.outputs import OutputField
from tests.fakes.models import model, pipeline, tensor


def field(text: str, max_batch_size: int = 0, *, batch: bool = False, **spec: Any) -> OutputField:
    kind = {} if "BYTES" not in text or "kind" in spec else {"kind": "text"}
    config = model([], text, max_batch_size=max_batch_size)
    outputs = {"y": {"tensor": text.partition(" ")[0], **kind, **spec}}
    return pipeline(config, outputs=outputs, batch=batch).outputs[0]


def rendered(output: OutputField, array: Any) -> Any:
    """Returns the JSON for the caller from Triton's array."""
    value = output.value_of(output.array_of(Tensor("Y", output.tensor.datatype, array)))
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


F32 = np.float32


class TestShapes:
    def test_lists_nest_by_shape(self) -> None:
        assert rendered(field("Y FP32 [-1,2]"), np.array([[1, 2], [3, 4]], F32)) == [[1, 2], [3, 4]]

    @pytest.mark.parametrize("dims", ["[1]", "[]"])
    def test_a_single_element_is_a_bare_value(self, dims: str) -> None:
        assert rendered(field(f"Y FP32 {dims}"), np.full((1,) if dims == "[1]" else (), 2.5, F32)) == 2.5

    def test_a_variable_dimension_is_always_a_list(self) -> None:
        assert rendered(field("Y FP32 [-1]"), np.array([7], F32)) == [7]

    def test_the_batch_dimension_is_removed(self) -> None:
        assert rendered(field("Y FP32 [2]", 8), np.array([[1, 2]], F32)) == [1, 2]
        assert rendered(field("Y FP32 [1]", 8), np.array([[1]], F32)) == 1

    def test_with_batch_the_caller_gets_a_list_of_items(self) -> None:
        assert rendered(field("Y FP32 [2]", 8, batch=True), np.array([[1, 2], [3, 4]], F32)) == [[1, 2], [3, 4]]
        assert rendered(field("Y FP32 [1]", 8, batch=True), np.array([[1], [2]], F32)) == [1, 2]

    def test_a_scalar_is_a_value_of_the_dims_1(self) -> None:
        """As the token count of vLLM."""
        assert rendered(field("Y UINT32 [1]"), np.array(7, np.uint32)) == 7

    def test_a_single_output_has_one_element_of_a_free_dimension(self) -> None:
        single = field("Y BYTES [-1]", single=True)
        assert rendered(single, bytes_array([b"ab"], (1,))) == "ab"
        with pytest.raises(ContractViolation, match=r"has shape \[2\]; \[1\] is declared"):
            rendered(single, bytes_array([b"ab", b"cd"], (2,)))

    def test_rows_that_are_not_the_items_need_batch(self) -> None:
        with pytest.raises(ContractViolation, match=r"has shape \[3,2\]; \[1,2\] is declared") as caught:
            rendered(field("Y FP32 [2]", 8), np.zeros((3, 2), F32))
        assert caught.value.hint == "The model wrote 3 rows for one item. With batch: true the answer has all rows."

    def test_a_bare_nan_is_null(self) -> None:
        assert rendered(field("Y FP32 [1]"), np.array([np.nan], F32)) is None

    @pytest.mark.parametrize(("kind", "value"), [("text", "ab"), ("binary", "YWI="), ("image", "YWI=")])
    def test_bytes_are_text_or_base64(self, kind: str, value: str) -> None:
        assert rendered(field("Y BYTES [1]", kind=kind), bytes_array([b"ab"], (1,))) == value
        assert rendered(field("Y BYTES [-1,1]", kind=kind), bytes_array([b"ab"] * 2, (2, 1))) == [[value]] * 2

    def test_json_is_passed_unchanged(self) -> None:
        assert rendered(field("Y BYTES [1]", kind="json"), bytes_array([b"[1, 2]"], (1,))) == [1, 2]
        assert rendered(field("Y BYTES [-1]", kind="json"), bytes_array([b"[1]", b"{}"], (2,))) == [[1], {}]


class TestViolations:
    @pytest.mark.parametrize(
        ("text", "size", "array"),
        [
            ("Y FP32 [2]", 0, np.zeros(3, F32)),
            ("Y FP32 [2]", 0, np.zeros((1, 2), F32)),
            ("Y FP32 [1]", 0, np.zeros(2, F32)),
            ("Y FP32 [2]", 8, np.zeros(2, F32)),
            ("Y FP32 [2]", 8, np.zeros((2, 2), F32)),
            ("Y FP32 [1]", 8, np.zeros((), F32)),
            ("Y FP32 [-1]", 0, np.zeros((), F32)),
        ],
    )
    def test_another_shape_is_a_violation(self, text: str, size: int, array: Any) -> None:
        with pytest.raises(ContractViolation, match=r"has shape \[") as caught:
            rendered(field(text, size), array)
        assert caught.value.tensor == "Y"

    def test_another_datatype_is_a_violation(self) -> None:
        with pytest.raises(ContractViolation, match="is FP64; FP32 is declared"):
            field("Y FP32 [1]").array_of(tensor("Y", "FP64", [1.0]))

    def test_invalid_json_is_a_violation(self) -> None:
        with pytest.raises(ContractViolation, match="is not JSON"):
            rendered(field("Y BYTES [1]", kind="json"), bytes_array([b"{secret"], (1,)))


@pytest.mark.parametrize("dims", ["[2,3]", "[-1]", "[1]"])
def test_an_empty_tensor_may_have_any_shape(dims: str) -> None:
    for shape in [(0,), (0, 4, 2), (2, 0)]:
        assert not field(f"Y FP32 {dims}").array_of(Tensor("Y", "FP32", np.zeros(shape, F32))).size


@pytest.mark.parametrize(
    ("text", "size", "batch", "empty"),
    [
        ("Y FP32 [1]", 0, False, None),
        ("Y FP32 [-1]", 0, False, []),
        ("Y BYTES [1]", 4, False, None),
        ("Y BYTES [1]", 4, True, []),
    ],
)
def test_the_typed_empty_value(text: str, size: int, batch: bool, empty: Any) -> None:
    assert field(text, size, batch=batch).empty_value == empty


def test_by_default_text_is_concatenated_and_numbers_listed() -> None:
    assert field("Y BYTES [1]").join == "concatenate"
    assert field("Y FP32 [1]").join == "list"
    assert field("Y BYTES [1]", join="last").join == "last"
    assert field("Y BYTES [1]").is_text_run
    assert not field("Y BYTES [-1]").is_text_run
    assert not field("Y BYTES [1]", join="last").is_text_run
