"""The collector builds an answer from responses: values, split characters, missing outputs, and the end."""

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import ContractViolation
from app.core.inference import BYTES, InferenceResponse, Tensor
from app.core.json import json_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector, WholeAnswer
from tests.toolkit.models import model, pipeline, response, tensor
from tests.toolkit.work import CountedText, grows_with

RULES = [{"reason": "no_text", "missing": ["TEXT"]}, {"reason": "no_ids", "empty": ["IDS"]}]


def streamed(**spec: Any) -> Pipeline:
    return pipeline(model([], ["TEXT BYTES [1]", "IDS INT32 [-1]"], decoupled=True), **spec)


def collector(p: Pipeline) -> Collector:
    return Collector(p, p.request_of_json(b"{}"))


def piece(text: bytes | None = None, ids: list[int] | None = None, *, is_final: bool = False) -> InferenceResponse:
    tensors = [] if text is None else [tensor("TEXT", BYTES, [text])]
    tensors += [] if ids is None else [tensor("IDS", "INT32", ids)]
    return response(*tensors, is_final=is_final)


@given(st.text(max_size=20), st.data())
def test_text_split_anywhere_is_joined(text: str, data: st.DataObject) -> None:
    content = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    c = collector(streamed())
    values = [c.add(piece(each, [1], is_final=place == len(pieces) - 1)) for place, each in enumerate(pieces)]
    assert "".join(value["TEXT"] for value in values if value) == text
    assert c.finish().outputs == ()


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=6), st.booleans())
def test_incomplete_characters_are_replaced_at_the_end(pieces: list[bytes], apart: bool) -> None:
    c = collector(streamed())
    texts = []
    for place, each in enumerate(pieces):
        values = c.add(piece(each, is_final=not apart and place == len(pieces) - 1))
        texts.append(values["TEXT"] if values else "")
    ending = c.finish()
    texts += [values["TEXT"] for values in ending.outputs]
    assert "".join(texts) == b"".join(pieces).decode("utf-8", "replace")


def test_a_response_without_outputs_creates_no_output_event() -> None:
    assert collector(streamed()).add(InferenceResponse({}, is_final=True)) is None


def test_an_output_missing_in_one_response_is_empty() -> None:
    c = collector(streamed())
    values = c.add(piece(ids=[1]))
    assert values is not None
    assert values["TEXT"] == ""
    values = c.add(piece(text=b"a"))
    assert values is not None
    assert values["IDS"] == []


def test_two_outputs_may_show_one_tensor() -> None:
    words = {"a": {"tensor": "TEXT", "kind": "text"}, "b": {"tensor": "TEXT", "kind": "binary"}}
    assert collector(streamed(outputs=words)).add(piece(b"hi")) == {"a": "hi", "b": "aGk="}


class TestEndings:
    def test_a_stream_without_outputs_ends_normally(self) -> None:
        assert collector(streamed()).finish().early_exit is None

    def test_missing_is_checked_over_the_whole_stream(self) -> None:
        c = collector(streamed(early_exit=RULES))
        c.add(piece(ids=[1]))
        assert c.finish().early_exit == "no_text"
        c = collector(streamed(early_exit=RULES))
        c.add(piece(ids=[1]))
        c.add(piece(text=b"a"))
        assert c.finish().early_exit is None

    def test_empty_is_checked_over_the_whole_stream(self) -> None:
        c = collector(streamed(early_exit=RULES))
        c.add(piece(b"a", []))
        c.add(piece(b"b", []))
        assert c.finish().early_exit == "no_ids"
        c = collector(streamed(early_exit=RULES))
        c.add(piece(b"a", []))
        c.add(piece(b"b", [1]))
        assert c.finish().early_exit is None

    def test_a_rule_covers_tensors_that_are_not_outputs(self) -> None:
        p = streamed(early_exit=RULES, outputs={"text": {"tensor": "TEXT", "kind": "text"}})
        c = collector(p)
        c.add(piece(b"a", [1]))
        assert c.finish().early_exit is None
        c = collector(p)
        c.add(piece(b"a", []))
        assert c.finish().early_exit == "no_ids"

    @pytest.mark.parametrize(("size", "shape"), [(0, (0,)), (0, (0, 2)), (8, (0, 2)), (8, (1, 0))])
    def test_no_elements_of_a_fixed_shape_without_a_rule_are_a_violation(
        self, size: int, shape: tuple[int, ...]
    ) -> None:
        config = model([], ["BOX FP32 [2]", "IDS INT32 [-1]"], max_batch_size=size)
        ids = tensor("IDS", "INT32", [[]] if size else [])
        answered = response(Tensor("BOX", "FP32", np.zeros(shape, np.float32)), ids)
        with pytest.raises(ContractViolation, match=r"'BOX' has shape .*; \[(1,)?2\] is declared") as caught:
            collector(pipeline(config)).add(answered)
        assert caught.value.hint == (
            "If the model may write none, declare an early_exit rule with empty: [BOX] in gateway.yaml."
        )
        c = collector(pipeline(config, early_exit=[{"reason": "no_box", "empty": ["BOX"]}]))
        assert c.add(answered) == {"BOX": [], "IDS": []}
        assert c.finish().early_exit == "no_box"

    def test_a_decoupled_model_may_write_no_elements(self) -> None:
        c = collector(streamed())
        c.add(response(Tensor("TEXT", BYTES, np.zeros((0,), np.object_))))
        assert c.finish().early_exit is None

    def test_a_missing_output_without_a_rule_is_a_violation(self) -> None:
        config = model([], ["TEXT BYTES [1]", "IDS INT32 [-1]"])
        with pytest.raises(ContractViolation, match="'IDS' was not written") as caught:
            collector(pipeline(config)).add(piece(b"a", is_final=True))
        assert caught.value.tensor == "IDS"
        c = collector(pipeline(config, early_exit=[{"reason": "no_ids", "missing": ["IDS"]}]))
        c.add(piece(b"a", is_final=True))
        assert c.finish().early_exit == "no_ids"


def test_a_tensor_of_another_type_is_a_violation() -> None:
    with pytest.raises(ContractViolation):
        collector(streamed()).add(response(tensor("IDS", "FP32", [1])))


def test_numbers_stay_an_array() -> None:
    values = collector(streamed()).add(piece(ids=[1, 2]))
    assert values is not None
    assert isinstance(values["IDS"], np.ndarray)


class TestJoinedArrays:
    def joined(self, text: str, *arrays: Any) -> Any:
        p = pipeline(model([], text, decoupled=True))
        whole = WholeAnswer(p, p.request_of_json(b"{}"))
        for array in arrays:
            whole.add(response(tensor("Y", text.split(" ")[1], array), is_final=False))
        return whole.finish().outputs[0]["Y"]

    def test_arrays_are_concatenated(self) -> None:
        value = self.joined("Y FP32 [-1]", [1.5, 2.5], [], [3.5])
        assert isinstance(value, np.ndarray)
        assert value.dtype == np.float32
        assert value.tolist() == [1.5, 2.5, 3.5]

    def test_items_of_different_shapes_become_a_list(self) -> None:
        value = self.joined("Y INT32 [-1,-1]", [[1, 2]], [[3], [4]])
        assert orjson.loads(json_of(value)) == [[1, 2], [3], [4]]

    def test_bare_values_become_a_list(self) -> None:
        assert self.joined("Y INT32 [1]", [1], [2]) == [1, 2]


def test_the_work_to_join_a_text_grows_with_its_length_only() -> None:
    class Decoder:
        def decode(self, text: bytes, *, final: bool = False) -> str:
            return CountedText(text.decode())

    def work(count: int) -> Callable[[], object]:
        p = streamed(outputs={"text": {"tensor": "TEXT", "kind": "text"}})
        answer = WholeAnswer(p, p.request_of_json(b"{}"))
        answer._texts = {"text": Decoder()}  # type: ignore[dict-item]
        pieces = [piece(b"a word ") for _ in range(count)]
        return lambda: [answer.add(each) for each in pieces]

    assert grows_with(work, 2000)
