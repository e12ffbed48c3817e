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


EMPTY = {"text": None, "ids": [], "reason": None, "score": None}


class TestAnOrdinaryModel:
    P = pipeline(model([], OUTPUTS), outputs=WORDS, early_exit=RULES)

    async def test_one_response_is_the_result(self) -> None:
        assert await ran(self.P, whole()) == ({"text": "hi", "ids": [1, 2], "reason": "stop", "score": 0.5}, None)

    async def test_an_incomplete_character_is_replaced(self) -> None:
        assert (await ran(self.P, whole("hi€".encode()[:-1])))[0]["text"] == "hi\ufffd"

    async def test_an_early_exit_is_the_empty_result(self) -> None:
        assert await ran(self.P, refusal("EXIT")) == (EMPTY, "nothing")

    async def test_an_error_that_matches_no_rule_is_raised(self) -> None:
        with pytest.raises(ModelError):
            await ran(self.P, refusal("EXIT "))
        with pytest.raises(ModelError):
            await ran(self.P, refusal("EXIT", "INTERNAL"))

    async def test_a_missing_output_is_a_violation(self) -> None:
        with pytest.raises(ContractViolation, match="'IDS' was not written"):
            await ran(self.P, response(tensor("TEXT", BYTES, [b"hi"])))

    async def test_a_partial_result_keeps_the_written_outputs(self) -> None:
        p = pipeline(model([], OUTPUTS), outputs=WORDS, early_exit=[{"reason": "no_ids", "missing": ["IDS"]}])
        answer = response(tensor("TEXT", BYTES, [b"hi"]), tensor("SCORE", "FP32", [0.5]))
        assert await ran(p, answer) == ({"text": "hi", "ids": [], "reason": None, "score": 0.5}, "no_ids")

    async def test_a_response_without_outputs_can_be_an_exit(self) -> None:
        p = pipeline(model([], OUTPUTS), outputs=WORDS, early_exit=[{"reason": "none", "missing": ["IDS", "TEXT"]}])
        assert await ran(p, InferenceResponse({})) == (EMPTY, "none")


class TestADecoupledModel:
    CONFIG = model([], OUTPUTS, decoupled=True)
    P = pipeline(CONFIG, outputs=WORDS, early_exit=RULES)

    async def test_each_output_is_joined_as_declared(self) -> None:
        answers = [whole(b"a", (1,), is_final=False), whole(b"b", (2, 3), is_final=False), InferenceResponse({})]
        assert await ran(self.P, *answers) == (
            {"text": "ab", "ids": [1, 2, 3], "reason": "stop", "score": [0.5, 0.5]},
            None,
        )

    async def test_zero_responses_are_an_ordinary_end(self) -> None:
        assert await ran(self.P, InferenceResponse({})) == ({"text": "", "ids": [], "reason": None, "score": []}, None)

    async def test_an_exit_keeps_the_previous_responses(self) -> None:
        values, reason = await ran(self.P, whole(b"a", (1,), is_final=False), refusal("EXIT"))
        assert (values["text"], values["ids"], reason) == ("a", [1], "nothing")

    async def test_a_character_in_two_pieces_is_joined(self) -> None:
        first, second = "€".encode()[:1], "€".encode()[1:]
        values, _ = await ran(self.P, whole(first, is_final=False), whole(second))
        assert values["text"] == "€"

    async def test_an_incomplete_last_character_is_replaced(self) -> None:
        values, _ = await ran(self.P, whole("€".encode()[:2], is_final=False), InferenceResponse({}))
        assert values["text"] == "\ufffd"
        assert values["score"] == [0.5]

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
        p = pipeline(self.CONFIG, outputs=WORDS, contract={"IDS": {"max_items": 1}})
        engine = FakeEngine(answers=[whole(ids=(1,), is_final=False), whole(ids=(1, 2), is_final=False), 3600.0])
        with pytest.raises(ContractViolation):
            await run_with(engine, p)
        assert engine.closed == 1

    async def test_a_cancellation_closes_the_call(self) -> None:
        engine = FakeEngine(answers=[whole(is_final=False), 3600.0])
        work = asyncio.create_task(run_with(engine, self.P))
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
