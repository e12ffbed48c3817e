"""``response_format`` at OpenAI's chat address: guided by the backend, or checked by the gateway."""

import asyncio
import json
import threading
from typing import Any

import pytest

from app.api.openai import chat_request
from app.core.inference import InferenceResponse
from app.llm.answer_schema import AnswerSchema
from tests.api.openai.conftest import (
    Gateways,
    ask,
    chunks,
    inputs,
    message_of,
    pieces_of,
    refusal,
    sampling,
    step,
    steps_of,
)
from tests.api.openai.test_tools import TOOLS, Message, guided_schema, read
from tests.llm.test_tool_calls import CALLS, written
from tests.toolkit.waiting import PATIENCE_S

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = {"type": "json_object"}
ADA = '{"name": "Ada", "age": 36}'
GUIDED = ["vllm", "tensorrt_llm"]
CHECKED = "tensorrt_llm_api"


def schema_of(schema: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


PERSONS = schema_of(PERSON)


class TestGuided:
    @pytest.mark.parametrize("preset", GUIDED)
    async def test_the_backend_gets_the_schema(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset, says=pieces_of(ADA))
        assert message_of(await ask(api, response_format=PERSONS))["content"] == ADA
        assert guided_schema(api, preset) == PERSON
        assert read(await ask(api, response_format=OBJECT, stream=True)) == Message(ADA, [], "stop")
        assert guided_schema(api, preset) == {"type": "object"}

    async def test_a_guided_answer_has_no_reasoning(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="qwen3", says=[ADA])
        assert message_of(await ask(api, response_format=PERSONS)) == {
            "role": "assistant",
            "content": ADA,
            "refusal": None,
        }

    async def test_tools_that_may_be_called_exclude_guiding(self, gateways: Gateways) -> None:
        api = await gateways.of(says=[written("hermes", *CALLS["hermes"])])
        assert read(await ask(api, response_format=PERSONS, tools=TOOLS)).calls
        assert "structured_outputs" not in sampling(api)
        api.engine.answers = steps_of("vllm", "Ada is 36.")
        mismatch = refusal(await ask(api, response_format=PERSONS, tools=TOOLS))
        assert mismatch[:2] == (502, "response_format_mismatch")
        assert refusal(await ask(api, response_format=OBJECT, tools=TOOLS))[1] == "response_format_mismatch"
        api.engine.answers = steps_of("vllm", ADA)
        assert message_of(await ask(api, response_format=PERSONS, tools=TOOLS, tool_choice="none"))["content"] == ADA
        assert guided_schema(api, "vllm") == PERSON

    async def test_the_type_text_changes_nothing(self, gateways: Gateways) -> None:
        api = await gateways.of(says=["Hello"])
        assert message_of(await ask(api, response_format={"type": "text"}))["content"] == "Hello"
        assert "structured_outputs" not in sampling(api)


async def checked(gateways: Gateways, text: str, format_: Any, **body: Any) -> Any:
    """The answer of a backend that cannot be guided."""
    api = await gateways.of(preset=CHECKED, reasoning=body.pop("reasoning", "none"), says=pieces_of(text))
    answered = await ask(api, response_format=format_, **body)
    assert not any("guided" in name for name in inputs(api))
    return answered


class TestChecked:
    async def test_an_answer_that_fits(self, gateways: Gateways) -> None:
        assert message_of(await checked(gateways, ADA, PERSONS))["content"] == ADA
        assert message_of(await checked(gateways, f" {ADA}\n", OBJECT))["content"].strip() == ADA
        assert message_of(await checked(gateways, ADA, schema_of(None)))["content"] == ADA
        assert read(await checked(gateways, ADA, PERSONS, stream=True)) == Message(ADA, [], "stop")
        answered = await checked(gateways, ADA, PERSONS, n=2)
        assert [each["message"]["content"] for each in answered.json()["choices"]] == [ADA, ADA]

    @pytest.mark.parametrize(
        ("text", "format_", "problem"),
        [
            ("Ada is 36.", OBJECT, "The model's answer is not JSON."),
            ("[1]", OBJECT, "The model's answer is not an object."),
            (f"```json\n{ADA}\n```", PERSONS, "The model's answer is not JSON."),
            (
                '{"name": "Ada"}',
                PERSONS,
                'The model\'s answer does not fit the schema at its root: "age" is a required',
            ),
            ('{"name": "ada", "age": 3}', PERSONS, "The model's answer does not fit the schema at name: "),
            ("[" * 5000 + "]" * 5000, schema_of({}), "The model's answer is not JSON."),
        ],
        ids=lambda value: str(value)[:20],
    )
    async def test_an_answer_that_does_not_fit(self, gateways: Gateways, text: str, format_: Any, problem: str) -> None:
        answered = await checked(gateways, text, format_)
        assert refusal(answered)[:2] == (502, "response_format_mismatch")
        assert answered.json()["error"]["message"].startswith(problem)
        *_, last = chunks(await checked(gateways, text, format_, stream=True))
        assert last["error"]["code"] == "response_format_mismatch"

    async def test_only_the_content_is_checked(self, gateways: Gateways) -> None:
        message = message_of(await checked(gateways, f"Who? Ada.</think>{ADA}", PERSONS, reasoning="qwen3"))
        assert (message["content"], message["reasoning"]) == (ADA, "Who? Ada.")

    async def test_an_answer_that_the_model_did_not_end_is_not_checked(self, gateways: Gateways) -> None:
        api = await gateways.of()
        answers: list[InferenceResponse] = [step(b'{"name": "A', reason=b"length", is_final=True)]
        api.engine.answers = answers
        choice = (await ask(api, response_format=PERSONS, tools=TOOLS)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "A', "length")

    async def test_a_large_answer_is_refused(self, gateways: Gateways) -> None:
        api = await gateways.of(preset=CHECKED, says=[json.dumps(["x" * 1000] * 1100)])
        answered = await ask(api, response_format=schema_of({}))
        assert answered.json()["error"]["message"].startswith("The model's answer is too large to be checked.")

    async def test_without_the_extra_only_objects_can_be_checked(
        self, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chat_request, "CAN_CHECK", False)
        assert message_of(await checked(gateways, ADA, OBJECT))["content"] == ADA
        api = await gateways.of(preset=CHECKED)
        answered = await ask(api, response_format=PERSONS)
        assert refusal(answered) == (400, "invalid_input", "response_format")


async def test_a_long_check_does_not_stop_other_requests(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered, check = threading.Event(), threading.Event(), AnswerSchema.problem_of

    def waiting(schema: AnswerSchema, text: str) -> str | None:
        begun.set()
        assert answered.wait(PATIENCE_S)
        return check(schema, text)

    monkeypatch.setattr(AnswerSchema, "problem_of", waiting)
    api = await gateways.of(preset=CHECKED, says=[json.dumps(["x"] * 200)])
    checking = asyncio.create_task(ask(api, response_format=schema_of({"items": {"type": "string"}})))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    assert (await api.client.get("/v1/models")).status_code == 200
    answered.set()
    assert message_of(await checking)["content"]
