"""Unary requests with an engine whose answers the test defines."""

import asyncio
from typing import Any

import orjson
import pytest

from app.core.answer import Ending
from app.core.errors import ContractViolation, GatewayError, InvalidInput, ModelError, UpstreamUnavailable
from app.core.inference import BYTES, Deadline, InferenceResponse
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer, run
from tests.toolkit.engine import Answer, FakeEngine
from tests.toolkit.models import ensemble, model, pipeline, refusal, response, tensor

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
    return await run(WholeAnswer(p, request), call(request, Deadline.after(20)))


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
    ],
)
async def test_other_errors_and_missing_outputs_are_raised(
    p: Pipeline, answer: Answer, error: type[GatewayError]
) -> None:
    with pytest.raises(error):
        await ran(p, answer)


class TestADecoupledModel:
    async def test_lists_are_joined_by_item(self) -> None:
        p = pipeline(
            model([], ["WORDS BYTES [-1]", "BOXES FP32 [-1,2]", "DOC BYTES [1]"], decoupled=True),
            outputs={
                "words": {"tensor": "WORDS", "kind": "text"},
                "boxes": {"tensor": "BOXES"},
                "doc": {"tensor": "DOC", "kind": "json"},
            },
        )
        piece = response(
            tensor("WORDS", BYTES, [b"a", b"b"]),
            tensor("BOXES", "FP32", [[1, 2]]),
            tensor("DOC", BYTES, [b'{"a": [1]}']),
            is_final=False,
        )
        assert (await ran(p, piece, piece))[0] == {
            "words": ["a", "b", "a", "b"],
            "boxes": [[1, 2], [1, 2]],
            "doc": [{"a": [1]}, {"a": [1]}],
        }

    async def test_a_contract_violation_closes_the_call(self) -> None:
        p = pipeline(DECOUPLED.config, outputs=WORDS, contract={"IDS": {"max_items": 1}})
        engine = FakeEngine(answers=[whole(ids=(1,), is_final=False), whole(ids=(1, 2), is_final=False), 3600.0])
        with pytest.raises(ContractViolation):
            await run_with(engine, p)
        assert engine.closed == 1

    async def test_a_cancellation_closes_the_call(self) -> None:
        engine = FakeEngine(answers=[whole(is_final=False), 3600.0])
        work = asyncio.create_task(run_with(engine, DECOUPLED))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert engine.closed == 1


class TestRejectsInput:
    """INVALID_ARGUMENT from a step in ``rejects_input`` is an error of the caller."""

    CONFIG = model([], OUTPUTS, name="step")
    P = pipeline(ensemble("whole", CONFIG), CONFIG, outputs=WORDS, rejects_input=["step"])

    @pytest.mark.parametrize("code", ["INVALID_ARGUMENT", None])
    async def test_a_step_that_names_itself_raises_invalid_input(self, code: str | None) -> None:
        with pytest.raises(InvalidInput) as caught:
            await ran(self.P, refusal("in ensemble 'whole', step: secret is too small", code))
        assert "secret" not in caught.value.detail

    @pytest.mark.parametrize(
        ("message", "code"),
        [
            ("in ensemble 'whole', other: no", "INVALID_ARGUMENT"),
            ("in ensemble 'whole', user wrote step: no", "INVALID_ARGUMENT"),
            ("in ensemble 'foreign', step: no", "INVALID_ARGUMENT"),
            ("in ensemble 'whole', step: no", "INTERNAL"),
        ],
    )
    async def test_other_messages_and_codes_are_model_errors(self, message: str, code: str) -> None:
        with pytest.raises(ModelError):
            await ran(self.P, refusal(message, code))

    async def test_the_pipelines_own_model_does_not_name_itself(self) -> None:
        p = pipeline(model([], OUTPUTS), outputs=WORDS, rejects_input=["model"])
        with pytest.raises(InvalidInput):
            await ran(p, refusal("whatever", "INVALID_ARGUMENT"))
        with pytest.raises(ModelError):
            await ran(p, refusal("whatever", None))


@pytest.mark.parametrize("error", [UpstreamUnavailable("gone"), ContractViolation("no", tensor="Y")])
async def test_errors_of_the_gateway_are_not_early_exits(error: GatewayError) -> None:
    p = pipeline(
        model([], OUTPUTS),
        outputs=WORDS,
        early_exit=[{"reason": "x", "error": {"code": "any", "message_pattern": ".*"}}],
    )
    with pytest.raises(type(error)):
        await ran(p, error)
