"""Responses become an answer: values, split characters, early exits, contracts, and the call that cancels a step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.mismatch import PipelineMismatch
from app.core.answer import Ending
from app.core.errors import ContractViolation, GatewayError, InvalidInput, ModelError, UpstreamUnavailable
from app.core.inference import BYTES, Deadline, InferenceResponse, Tensor
from app.core.json import json_of
from app.core.model import TensorSpec
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector, run
from tests.toolkit.engine import Answer, FakeEngine
from tests.toolkit.models import ensemble, model, pipeline, refusal, response, tensor
from tests.toolkit.work import CountedText, grows_with

OUTPUTS = ["TEXT BYTES [1]", "IDS INT32 [-1]", "REASON BYTES [1]", "SCORE FP32 [1]"]
WORDS = {
    "text": {"tensor": "TEXT", "kind": "text"},
    "ids": {"tensor": "IDS"},
    "reason": {"tensor": "REASON", "kind": "text", "join": "last"},
    "score": {"tensor": "SCORE"},
}
RULES = [{"reason": "nothing", "error": {"code": "ALREADY_EXISTS", "message": "EXIT"}}]


async def ran(p: Pipeline, *answers: Answer) -> tuple[dict[str, Any], str | None]:
    ending = await run_with(FakeEngine(answers=list(answers)), p)
    return orjson.loads(orjson.dumps(ending.outputs[0], option=orjson.OPT_SERIALIZE_NUMPY)), ending.early_exit


async def run_with(engine: FakeEngine, p: Pipeline) -> Ending:
    request, call = p.request_of_json(b"{}"), engine.infer_stream if p.config.decoupled else engine.infer
    return await run(Collector(p, request, is_whole=True), call(request, Deadline.after(20)))


def whole(text: bytes = b"hi", ids: tuple[int, ...] = (1, 2), *, is_final: bool = True) -> InferenceResponse:
    return response(
        tensor("TEXT", BYTES, [text]),
        tensor("IDS", "INT32", list(ids)),
        tensor("REASON", BYTES, [b"stop"]),
        tensor("SCORE", "FP32", [0.5]),
        is_final=is_final,
    )


def part(text: bytes, ids: tuple[int, ...] = (1,)) -> InferenceResponse:
    return whole(text, ids, is_final=False)


PLAIN = pipeline(model([], OUTPUTS), outputs=WORDS, early_exit=RULES)
DECOUPLED = pipeline(model([], OUTPUTS, decoupled=True), outputs=WORDS, early_exit=RULES)
NOTHING = pipeline(model([], OUTPUTS), outputs=WORDS, early_exit=[{"reason": "none", "missing": ["IDS"]}])
ANY_ERROR = [{"reason": "x", "error": {"code": "any", "message_pattern": ".*"}}]
ANY = pipeline(model([], OUTPUTS), outputs=WORDS, early_exit=ANY_ERROR)
END = InferenceResponse({})
FULL = {"text": "hi", "ids": [1, 2], "reason": "stop", "score": 0.5}
ONE = {"text": "a", "ids": [1], "reason": "stop", "score": [0.5]}
TWO = [0.5, 0.5]
EMPTY = {"text": None, "ids": [], "reason": None, "score": None}
HALF_A_CHARACTER = "\u20ac".encode()[:1]


@pytest.mark.parametrize(
    ("p", "answers", "values", "reason"),
    [
        (PLAIN, [whole()], FULL, None),
        (PLAIN, [refusal("EXIT")], EMPTY, "nothing"),
        (NOTHING, [END], EMPTY, "none"),
        (NOTHING, [response(tensor("TEXT", BYTES, [b"hi"]))], {**EMPTY, "text": "hi"}, "none"),
        (DECOUPLED, [part(b"a"), part(b"b", (2, 3)), END], {**ONE, "text": "ab", "ids": [1, 2, 3], "score": TWO}, None),
        (DECOUPLED, [END], {"text": "", "ids": [], "reason": None, "score": []}, None),
        (DECOUPLED, [part(b"a"), refusal("EXIT")], ONE, "nothing"),
        (DECOUPLED, [part(HALF_A_CHARACTER), END], {**ONE, "text": "\ufffd"}, None),
    ],
)  # fmt: skip
async def test_responses_become_one_answer(p: Pipeline, answers: list[Answer], values: Any, reason: str | None) -> None:
    assert await ran(p, *answers) == (values, reason)


@pytest.mark.parametrize(
    ("p", "answer", "error"),
    [
        (PLAIN, refusal("EXIT "), ModelError),
        (PLAIN, refusal("EXIT", "INTERNAL"), ModelError),
        (DECOUPLED, UpstreamUnavailable("gone"), UpstreamUnavailable),
        # an error of the gateway is no early exit
        (ANY, UpstreamUnavailable("gone"), UpstreamUnavailable),
        (ANY, ContractViolation("no", tensor="Y"), ContractViolation),
    ],
)
async def test_other_errors_and_missing_outputs_are_raised(
    p: Pipeline, answer: Answer, error: type[GatewayError]
) -> None:
    with pytest.raises(error):
        await ran(p, answer)


async def test_a_contract_violation_closes_the_call() -> None:
    p = pipeline(DECOUPLED.config, outputs=WORDS, contract={"IDS": {"max_items": 1}})
    engine = FakeEngine(answers=[whole(ids=(1,), is_final=False), whole(ids=(1, 2), is_final=False), 3600.0])
    with pytest.raises(ContractViolation):
        await run_with(engine, p)
    assert engine.closed == 1


STEP = model([], OUTPUTS, name="step")
OF_STEP = pipeline(ensemble("whole", STEP), STEP, outputs=WORDS, rejects_input=["step"])
OF_MODEL = pipeline(model([], OUTPUTS), outputs=WORDS, rejects_input=["model"])


@pytest.mark.parametrize(
    ("p", "message", "code", "error"),
    [
        *((OF_STEP, "in ensemble 'whole', step: secret", code, InvalidInput) for code in ("INVALID_ARGUMENT", None)),
        (OF_STEP, "in ensemble 'whole', other: secret", "INVALID_ARGUMENT", ModelError),
        (OF_STEP, "in ensemble 'whole', user wrote step: secret", "INVALID_ARGUMENT", ModelError),
        (OF_STEP, "in ensemble 'foreign', step: secret", "INVALID_ARGUMENT", ModelError),
        (OF_STEP, "in ensemble 'whole', step: secret", "INTERNAL", ModelError),
        # the pipeline's own model does not name itself
        (OF_MODEL, "secret", "INVALID_ARGUMENT", InvalidInput),
        (OF_MODEL, "secret", None, ModelError),
    ],
)
async def test_invalid_argument_of_a_step_in_rejects_input_is_an_error_of_the_caller(
    p: Pipeline, message: str, code: str | None, error: type[GatewayError]
) -> None:
    with pytest.raises(error) as caught:
        await ran(p, refusal(message, code))
    assert "secret" not in caught.value.detail


OUTPUT_RULES = [{"reason": "no_text", "missing": ["TEXT"]}, {"reason": "no_ids", "empty": ["IDS"]}]
TEXT_ONLY = {"text": {"tensor": "TEXT", "kind": "text"}}


def streamed(**spec: Any) -> Pipeline:
    return pipeline(model([], ["TEXT BYTES [1]", "IDS INT32 [-1]"], decoupled=True), **spec)


def collector(p: Pipeline) -> Collector:
    return Collector(p, p.request_of_json(b"{}"))


def piece(text: bytes | None = None, ids: list[int] | None = None, *, is_final: bool = False) -> InferenceResponse:
    tensors = [] if text is None else [tensor("TEXT", BYTES, [text])]
    tensors += [] if ids is None else [tensor("IDS", "INT32", ids)]
    return response(*tensors, is_final=is_final)


@given(st.binary(max_size=30) | st.text(max_size=20).map(str.encode), st.data(), st.booleans())
def test_text_split_anywhere_is_joined_and_incomplete_characters_are_replaced(
    content: bytes, data: st.DataObject, apart: bool
) -> None:
    """``apart``: the final response has no text."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    c = collector(streamed())
    values = [c.add(piece(each, is_final=not apart and place == len(pieces) - 1)) for place, each in enumerate(pieces)]
    rest = c.finish().outputs
    assert "".join(value["TEXT"] for value in (*values, *rest) if value) == content.decode("utf-8", "replace")
    assert apart or rest == ()


def test_an_output_that_is_missing_or_has_no_elements_is_empty() -> None:
    c = collector(streamed())
    values = c.add(piece(ids=[1, 2]))
    assert isinstance(values["IDS"], np.ndarray)  # numbers stay an array
    assert values["TEXT"] == ""
    assert c.add(piece(text=b"a"))["IDS"] == []
    assert c.add(response(Tensor("TEXT", BYTES, np.zeros((0,), np.object_)))) == {"TEXT": "", "IDS": []}
    assert c.add(InferenceResponse({}, is_final=True)) is None
    assert c.finish().early_exit is None
    assert collector(streamed()).finish().early_exit is None  # also without any output


def test_two_outputs_may_show_one_tensor() -> None:
    words = {"a": {"tensor": "TEXT", "kind": "text"}, "b": {"tensor": "TEXT", "kind": "binary"}}
    assert collector(streamed(outputs=words)).add(piece(b"hi")) == {"a": "hi", "b": "aGk="}


class TestEndings:
    @pytest.mark.parametrize(
        ("pieces", "expected"),
        [
            # missing and empty hold over the whole stream
            ([(None, [1])], "no_text"),
            ([(None, [1]), (b"a", None)], None),
            ([(b"a", []), (b"b", [])], "no_ids"),
            ([(b"a", []), (b"b", [1])], None),
        ],
    )
    @pytest.mark.parametrize("outputs", [None, TEXT_ONLY], ids=["all outputs", "a rule covers other tensors too"])
    def test_rules_hold_for_the_whole_stream(self, pieces: list[Any], expected: str | None, outputs: Any) -> None:
        c = collector(streamed(early_exit=OUTPUT_RULES, outputs=outputs))
        for text, ids in pieces:
            c.add(piece(text, ids))
        assert c.finish().early_exit == expected

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

    def test_a_missing_output_without_a_rule_is_a_violation(self) -> None:
        config = model([], ["TEXT BYTES [1]", "IDS INT32 [-1]"])
        with pytest.raises(ContractViolation, match="'IDS' was not written") as caught:
            collector(pipeline(config)).add(piece(b"a", is_final=True))
        assert caught.value.tensor == "IDS"
        c = collector(pipeline(config, early_exit=[{"reason": "no_ids", "missing": ["IDS"]}]))
        c.add(piece(b"a", is_final=True))
        assert c.finish().early_exit == "no_ids"


@pytest.mark.parametrize(
    ("text", "arrays", "joined", "dtype"),
    [
        ("Y FP32 [-1]", [[1.5, 2.5], [], [3.5]], [1.5, 2.5, 3.5], np.float32),
        ("Y FP32 [-1,2]", [[[1, 2]], [[1, 2]]], [[1, 2], [1, 2]], np.float32),
        # items of different shapes, bare values and JSON become a list
        ("Y INT32 [-1,-1]", [[[1, 2]], [[3], [4]]], [[1, 2], [3], [4]], None),
        ("Y INT32 [1]", [[1], [2]], [1, 2], None),
        ("Y BYTES [1]", [[b'{"a": [1]}'], [b'{"a": [1]}']], [{"a": [1]}, {"a": [1]}], None),
    ],
)
def test_the_values_of_a_decoupled_model_are_joined(text: str, arrays: list[Any], joined: Any, dtype: Any) -> None:
    kind = "json" if "BYTES" in text else "number"
    p = pipeline(model([], text, decoupled=True), outputs={"Y": {"tensor": "Y", "kind": kind}})
    answer = Collector(p, p.request_of_json(b"{}"), is_whole=True)
    for array in arrays:
        answer.add(response(tensor("Y", text.split(" ")[1], array), is_final=False))
    value = answer.finish().outputs[0]["Y"]
    assert orjson.loads(json_of(value)) == joined
    assert getattr(value, "dtype", None) == dtype


def test_the_work_to_join_a_text_grows_with_its_length_only() -> None:
    class Decoder:
        def decode(self, text: bytes, *, final: bool = False) -> str:
            return CountedText(text.decode())

    def work(count: int) -> Callable[[], object]:
        p = streamed(outputs=TEXT_ONLY)
        answer = Collector(p, p.request_of_json(b"{}"), is_whole=True)
        answer._texts = {"text": Decoder()}  # type: ignore[dict-item]
        pieces = [piece(b"a word ") for _ in range(count)]
        return lambda: [answer.add(each) for each in pieces]

    assert grows_with(work, 2000)


def of_shape(*shape: int) -> InferenceResponse:
    return response(Tensor("T", "INT32", np.zeros(shape, np.int32)))


def contracted(contract: dict[str, Any], max_batch_size: int = 0) -> Collector:
    """The tensor of the contract is not an output of the pipeline, so that only the contract is checked."""
    config = model([], ["Y FP32 [1]"], max_batch_size=max_batch_size, decoupled=True)
    tensor = TensorSpec("T", "INT32", tuple(contract.get("shape", [-1])))
    config = replace(config, outputs=(*config.outputs, tensor))
    return collector(pipeline(config, outputs={"y": {"tensor": "Y"}}, contract={"T": contract}))


@pytest.mark.parametrize(
    ("contract", "max_batch_size", "shapes", "failing"),
    [
        ({"max_items": 2}, 0, [(1,), (2,), (0,)], (3,)),
        ({"max_items": 2}, 0, [(1, 2)], (2, 2)),
        ({"shape": [-1, 2]}, 0, [(5, 2), (0, 2)], (2, 3)),
        ({"shape": [1]}, 0, [], (1, 2)),
        # the shape is that of the tensor as declared: dimensions of size 1 may be missing or extra
        ({"shape": [1]}, 0, [(1, 1), ()], (2,)),
        ({"shape": [5]}, 4, [(5,), (1, 5)], (4,)),
        # without the batch dimension
        ({"shape": [1]}, 4, [(1, 1)], (1, 2)),
        ({"shape": [1]}, 4, [], (2, 1)),
        ({"not_growing": True}, 0, [(2,), (1,), (2,)], (3,)),
    ],
    ids=str,
)
def test_a_violation_is_found_at_its_response(
    contract: dict[str, Any], max_batch_size: int, shapes: list[tuple[int, ...]], failing: tuple[int, ...]
) -> None:
    found = contracted(contract, max_batch_size)
    found.add(response(tensor("Y", "FP32", [[0.0]])))  # responses without the tensor are ignored
    for shape in shapes:
        found.add(of_shape(*shape))
    with pytest.raises(ContractViolation, match="Output 'T'") as caught:
        found.add(of_shape(*failing))
    assert caught.value.tensor == "T"


def test_a_contract_may_have_other_dimensions_of_size_1_than_the_model() -> None:
    p = pipeline(model([], "T INT32 [2]", max_batch_size=4), contract={"T": {"shape": [1, 2]}})
    assert collector(p).add(of_shape(2)) is not None
    with pytest.raises(PipelineMismatch, match=r"is \[1,3\], and the model's output 'T' is \[2\]"):
        pipeline(model([], "T INT32 [2]"), contract={"T": {"shape": [1, 3]}})


GROWS = "A step sends all items of 'T' with each response. It must send only items that are new."


@pytest.mark.parametrize(
    ("contract", "max_batch_size", "detail", "hint"),
    [
        ({"max_items": 1}, 0, "the contract allows at most 1 items.", GROWS),
        ({"shape": [5]}, 0, "the contract requires [5].", None),
        ({"shape": [1, 5]}, 4, "the contract requires [1,1,5] with the batch dimension.", None),
        ({"shape": [5]}, 4, "the contract requires [1,5] with the batch dimension.", None),
    ],
)
def test_a_violation_names_what_was_sent_and_what_was_agreed(
    contract: dict[str, Any], max_batch_size: int, detail: str, hint: str | None
) -> None:
    with pytest.raises(ContractViolation) as caught:
        contracted(contract, max_batch_size).add(of_shape(2, 5))
    assert (caught.value.detail, caught.value.hint) == (f"Output 'T' has shape [2,5]; {detail}", hint)


@pytest.mark.parametrize(
    ("parameter", "body", "most"),
    [({"default": 1}, b'{"chunk": 2}', 2), ({"default": 1}, b"{}", 1), ({"optional": True}, b"{}", None)],
)
def test_a_parameter_of_the_request_may_be_the_limit(parameter: dict[str, Any], body: bytes, most: int | None) -> None:
    p = pipeline(
        model([], "T INT32 [-1]", max_batch_size=4),
        parameters={"chunk": {"type": "integer", **parameter}},
        contract={"T": {"max_items": "chunk", "shape": [-1]}},
    )
    found = Collector(p, p.request_of_json(body))
    found.add(of_shape(1, 100 if most is None else most))
    if most is not None:
        with pytest.raises(ContractViolation, match=f"at most {most}"):
            found.add(of_shape(1, most + 1))
