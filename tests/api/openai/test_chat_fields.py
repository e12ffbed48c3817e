"""What a chat says of its answer: tools, reasoning and ``response_format``, over the presets of LLM backends.

Also the output ``reasoning`` of a pipeline.
"""

import asyncio
import json
import threading
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from app.api.openai import chat_request
from app.api.openai.choices import AT_ONCE
from app.llm.answer_schema import AnswerSchema
from tests.api.conftest import events
from tests.api.openai.conftest import (
    ASKED,
    NAMED,
    Gateways,
    allowed,
    ask,
    chunks,
    inputs,
    message_of,
    refusal,
    sampling,
    step,
    steps_of,
)
from tests.api.openai.test_refusals import tool
from tests.llm.test_tool_calls import CALLS, FORMATS, pieces_of, written
from tests.pipelines.test_presets import CONFIGS
from tests.toolkit.gateway import Served
from tests.toolkit.waiting import PATIENCE_S

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
NO_PARAMETERS = {"type": "object", "properties": {}}
ARGUMENTS = {"city": 'Sao "P" {x}\n', "days": 3}


def prompt(api: Served) -> Any:
    """What the template got."""
    return json.loads(inputs(api)["text_input"].removesuffix(b"<think>"))


class Message(NamedTuple):
    """What a choice says; ``calls`` with their arguments."""

    content: str
    calls: list[tuple[str, Any]]
    finish_reason: str
    reasoning: str = ""


def read(answered: httpx.Response) -> Message:
    """The message of an answer, or the one that the deltas of a stream add up to."""
    if not answered.headers["content-type"].startswith("text/event-stream"):
        message, reason = message_of(answered), answered.json()["choices"][0]["finish_reason"]
        functions = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        assert message["content"] or (message["content"] is None) == bool(functions)
        content, reasoning = message["content"] or "", message.get("reasoning", "")
        assert reasoning == message.get("reasoning_content", "")
    else:
        *events, done = chunks(answered)
        assert done == "[DONE]"
        choices = [choice for event in events for choice in event["choices"]]
        deltas, functions = [choice["delta"] for choice in choices], []
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(functions), "function")
                functions.append((call["function"]["name"], ""))
            name, arguments = functions[call["index"]]
            functions[call["index"]] = name, arguments + call["function"]["arguments"]
        content, reasoning, same = (
            "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning", "reasoning_content")
        )
        assert reasoning == same
        reason = choices[-1]["finish_reason"]
    return Message(content, [(name, json.loads(arguments)) for name, arguments in functions], reason, reasoning)


EXPECTED = [("weather", ARGUMENTS), ("time", {})]


@pytest.mark.parametrize("format_", FORMATS)
async def test_calls_in_each_format_and_its_special_tokens(gateways: Gateways, format_: str) -> None:
    api = await gateways.of(format_, says=[*pieces_of("Wait.\n" + written(format_, *CALLS[format_]))])
    answered = await ask(api, tools=TOOLS)
    ids = [call["id"] for call in message_of(answered)["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 if format_ == "mistral" else each.startswith("call_") for each in ids)
    for each in (answered, await ask(api, tools=TOOLS, stream=True)):
        assert read(each) == Message("Wait.", EXPECTED, "tool_calls")
    api.engine.answers = steps_of("vllm", "Hello")
    assert message_of(await ask(api)) == {"role": "assistant", "content": "Hello", "refusal": None}
    assert sampling(api).get("skip_special_tokens") == (False if format_ in ("mistral", "gpt_oss") else None)
    assert message_of(await ask(api, skip_special_tokens=True))
    assert sampling(api)["skip_special_tokens"] is True


LARGE = 40 * AT_ONCE


@pytest.mark.parametrize("format_", FORMATS)
class TestLargeAnswers:
    @pytest.mark.parametrize("pieces", [1, 3])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_other_requests_run_while_one_is_read(
        self, gateways: Gateways, format_: str, pieces: int, stream: bool
    ) -> None:
        """The loop turns at least once for each AT_ONCE characters, and the answer is the same."""
        api = await gateways.of(format_)
        before = ("[x] {y} <z>\n" * LARGE)[:LARGE]
        text = before + written(format_, *CALLS[format_])
        api.engine.answers = steps_of("vllm", *pieces_of(text, len(text) // pieces + 1))
        turns, is_answered = 0, False

        async def turn() -> None:
            nonlocal turns
            while not is_answered:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        answered = await ask(api, tools=TOOLS, stream=stream)
        is_answered = True
        await turning
        assert turns >= LARGE // AT_ONCE - pieces
        assert read(answered) == Message(before.rstrip(), EXPECTED, "tool_calls")

    async def test_many_small_pieces_do_not_stay_behind_a_large_one(self, gateways: Gateways, format_: str) -> None:
        api = await gateways.of(format_)
        words = [f"word {number} " for number in range(200)]
        api.engine.answers = steps_of("vllm", "x" * LARGE, *words, *pieces_of(written(format_, *CALLS[format_])))
        *events, _done = chunks(await ask(api, tools=TOOLS, stream=True))
        contents = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(contents) == ("x" * LARGE + "".join(words)).rstrip()
        assert max(map(len, contents)) <= AT_ONCE


async def test_the_template_gets_tools_and_calls(gateways: Gateways) -> None:
    api = await gateways.of(says=["It is hot."])
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
    messages = [
        {**ASKED[0], "name": "A"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "31"}]},
    ]
    assert message_of(await ask(api, messages=messages, tools=TOOLS))["content"] == "It is hot."
    got = prompt(api)
    function = {"name": "weather", "arguments": {"city": "Lima"}}
    assert got["messages"] == [
        {"role": "user", "content": "Hi", "name": "A"},
        {"role": "assistant", "content": "", "tool_calls": [{**called, "function": function}]},
        {"role": "tool", "content": "31", "tool_call_id": "c1"},
    ]
    assert got["tools"][0] == TOOLS[0]
    assert got["tools"][1]["function"] == {"name": "time", "description": "", "parameters": NO_PARAMETERS}


CALL, TIME = CALLS["hermes"]


@pytest.mark.parametrize("preset", CONFIGS)
class TestToolChoice:
    async def test_a_call_is_optional_unless_it_is_required(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset, says=[CALL])
        assert message_of(await ask(api, tools=TOOLS, tool_choice="none"))["content"] == CALL
        assert prompt(api)["tools"] is None
        for body in ({}, {"tool_choice": "auto"}):
            api.engine.answers = steps_of(preset, *pieces_of(CALL))
            assert read(await ask(api, tools=TOOLS, **body)) == Message("", EXPECTED[:1], "tool_calls")
            api.engine.answers = steps_of(preset, "Hel", "lo")
            assert message_of(await ask(api, tools=TOOLS, **body))["content"] == "Hello"
        api.engine.answers = steps_of(preset, CALL, TIME)
        assert read(await ask(api, tools=TOOLS, parallel_tool_calls=False)).calls == EXPECTED[:1]

    async def test_required_is_a_call(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        calls = [{"name": name, "parameters": arguments} for name, arguments in EXPECTED]
        text = CALL + TIME if preset == "tensorrt_llm_api" else json.dumps(calls)
        for stream in (False, True):
            api.engine.answers = steps_of(preset, *pieces_of(text))
            answered = await ask(api, tools=TOOLS, tool_choice="required", stream=stream)
            assert read(answered) == Message("", EXPECTED, "tool_calls")
        if preset == "tensorrt_llm_api":
            return
        schema = guided_schema(api, preset)
        jsonschema.validate([{"name": "time", "parameters": {}}], schema)
        for wrong in ([], [{"name": "other", "parameters": {}}], [{"name": "weather", "parameters": {}}]):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, schema)

    async def test_a_name_is_a_call_of_this_function(self, gateways: Gateways, preset: str) -> None:
        text = CALL if preset == "tensorrt_llm_api" else json.dumps(ARGUMENTS)
        api = await gateways.of(preset=preset, says=pieces_of(text))
        for stream in (False, True):
            answered = await ask(api, tools=TOOLS, tool_choice=NAMED, stream=stream)
            assert read(answered) == Message("", EXPECTED[:1], "stop")
        if preset != "tensorrt_llm_api":
            assert guided_schema(api, preset) == WEATHER

    async def test_only_allowed_tools_are_called(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset, says=[CALL, TIME])
        assert read(await ask(api, tools=TOOLS, tool_choice=allowed("auto"))).calls == EXPECTED[:1]
        assert [each["function"]["name"] for each in prompt(api)["tools"]] == ["weather"]
        name, arguments = EXPECTED[0]
        guided = json.dumps([{"name": name, "parameters": arguments}])
        api.engine.answers = steps_of(preset, CALL if preset == "tensorrt_llm_api" else guided)
        assert read(await ask(api, tools=TOOLS, tool_choice=allowed("required"))).calls == EXPECTED[:1]
        api.engine.answers = steps_of(preset, TIME)
        answered = await ask(api, tools=TOOLS, tool_choice=allowed("required"))
        assert refusal(answered)[:2] == (502, "tool_call_missing")

    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "name"])
    async def test_a_missing_call_is_an_error(self, gateways: Gateways, preset: str, choice: Any) -> None:
        api = await gateways.of(preset=preset, says=["I will ", TIME.replace("time", "whether")])
        answered = await ask(api, tools=TOOLS, tool_choice=choice)
        assert refusal(answered)[:2] == (502, "tool_call_missing")
        *_, last = chunks(await ask(api, tools=TOOLS, tool_choice=choice, stream=True))
        assert last["error"]["code"] == "tool_call_missing"


def guided_schema(api: Served, preset: str) -> Any:
    """The schema that the backend got."""
    if preset == "vllm":
        return json.loads(sampling(api)["structured_outputs"])["json"]
    assert inputs(api)["guided_decoding_guide_type"] == b"json_schema"
    return json.loads(inputs(api)["guided_decoding_guide"])


async def test_a_required_call_is_wrong_unless_it_is_only_too_long(gateways: Gateways) -> None:
    api = await gateways.of("mistral", preset="tensorrt_llm_api", says=["[TOOL_CALLS]weather[ARGS]{city}"])
    assert refusal(await ask(api, tools=TOOLS, tool_choice="required"))[:2] == (502, "tool_call_missing")
    api = await gateways.of()
    api.engine.answers = [step(b'{"city": "Li', reason=b"length", is_final=True)]
    choice = (await ask(api, tools=TOOLS, tool_choice=NAMED)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Li'


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_at_the_limit_within_a_call_says_so(gateways: Gateways, stream: bool) -> None:
    api = await gateways.of()
    api.engine.answers = [step(f"{CALL}<tool_call>".encode(), reason=b"length", is_final=True)]
    answered = read(await ask(api, tools=TOOLS, stream=stream))
    assert (answered.calls, answered.finish_reason) == (EXPECTED[:1], "length")


async def test_definitions_of_several_functions_are_one_list(gateways: Gateways) -> None:
    api = await gateways.of(says=['[{"name": "f", "parameters": {}}]'])
    tools = [
        tool("f", **{"$defs": {"A": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}),
        tool("g", **{"$defs": {"A": {"type": "string"}, "B": {}}}),
    ]
    await ask(api, tools=tools, tool_choice="required", parallel_tool_calls=False)
    schema = guided_schema(api, "vllm")
    assert (schema["$defs"], schema["maxItems"]) == ({"A": {"type": "string"}, "B": {}}, 1)
    jsonschema.validate([{"name": "f", "parameters": {"a": "x"}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "f", "parameters": {"a": 1}}], schema)


async def test_the_openapi_document_describes_tools_and_reasoning(gateways: Gateways) -> None:
    api = await gateways.of(reasoning="qwen3")
    document = (await api.client.get("/openapi.json")).json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    body = {"model": "llama", "messages": messages, "tools": TOOLS, "tool_choice": NAMED, "reasoning_effort": "low"}
    for choice in (NAMED, allowed("required"), "auto"):
        jsonschema.validate({**body, "tool_choice": choice}, schema)
    api.engine.answers = steps_of("vllm", json.dumps(ARGUMENTS))
    answers = {"components": document["components"], "$ref": "#/components/schemas/OpenAIChatCompletion"}
    answered = await ask(api, **{name: value for name, value in body.items() if name != "model"})
    jsonschema.validate(answered.json(), answers)
    for chunk in chunks(await ask(api, messages=messages, tools=TOOLS, tool_choice=NAMED, stream=True))[:-1]:
        jsonschema.validate(chunk, {**answers, "$ref": "#/components/schemas/OpenAIChatCompletionChunk"})
    for wrong in ({"tools": [{"type": "f"}]}, {"tool_choice": "all"}, {"messages": [{"role": "bot"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body | wrong, schema)


class TestReasoning:
    async def test_precedes_a_text_or_a_call(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="qwen3", says=pieces_of("Hm.\n</think>\n\nYes."))
        for stream in (False, True):
            assert read(await ask(api, stream=stream)) == Message("Yes.", [], "stop", "Hm.")
        api = await gateways.of(reasoning="[<think>, </think>]", says=pieces_of(f"Hm.</think>{CALL}"))
        assert read(await ask(api, tools=TOOLS)) == Message("", EXPECTED[:1], "tool_calls", "Hm.")

    async def test_the_template_gets_the_variables_and_earlier_reasoning(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="qwen3", says=["Hm.</think>Yes."])
        earlier = {"role": "assistant", "content": "A", "reasoning": "B", "reasoning_content": "B", "tool_calls": None}
        body = {"reasoning_effort": "high", "chat_template_kwargs": {"deep": {"a": [1]}}}
        message_of(await ask(api, messages=[*ASKED, earlier], **body))
        got = prompt(api)
        assert (got["effort"], got["deep"]) == ("high", {"a": [1]})
        assert got["messages"][1] == {"role": "assistant", "content": "A", "reasoning_content": "B", "thinking": "B"}


LLAMA = "/v1/pipelines/llama"
ANSWER = "Hm, é.\n</think>\n\nYes. "


async def whole(api: Served) -> Any:
    answered = await api.client.post(LLAMA, json={"prompt": "Hi<think>"})
    assert answered.status_code == 200, answered.text
    return answered.json()


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("preset", CONFIGS)
async def test_the_reasoning_is_an_output_of_its_own(gateways: Gateways, preset: str, size: int) -> None:
    api = await gateways.of("null", preset, "qwen3", says=pieces_of(ANSWER, size))
    answer = await whole(api)
    assert (answer["reasoning"], answer["text"]) == ("Hm, é.", "Yes. ")
    answered = await api.client.post(f"{LLAMA}/stream", json={"prompt": "Hi<think>"})
    outputs = [data for _, name, data in events(answered) if name == "output"]
    assert "".join(each["reasoning"] for each in outputs) == "Hm, é."
    assert "".join(each["text"] for each in outputs) == "Yes. "


async def test_the_schemas_and_the_description_have_the_output(gateways: Gateways) -> None:
    api = await gateways.of("null", reasoning="qwen3", says=pieces_of(ANSWER))
    document = (await api.client.get("/openapi.json")).json()
    result = document["components"]["schemas"]["llama_result"]
    assert "reasoning" in result["required"]
    jsonschema.validate(await whole(api), {"components": document["components"], **result})
    described = (await api.client.get(LLAMA)).json()["outputs"]
    assert "reasoning" in [each["name"] for each in described]


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = {"type": "json_object"}
ADA = '{"name": "Ada", "age": 36}'
CHECKED = "tensorrt_llm_api"


def schema_of(schema: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


PERSONS = schema_of(PERSON)


class TestGuided:
    @pytest.mark.parametrize("preset", ["vllm", "tensorrt_llm"])
    async def test_the_backend_gets_the_schema(self, gateways: Gateways, preset: str) -> None:
        """A guided answer has no reasoning."""
        api = await gateways.of(preset=preset, reasoning="qwen3", says=pieces_of(ADA))
        message = {"role": "assistant", "content": ADA, "refusal": None}
        assert message_of(await ask(api, response_format=PERSONS)) == message
        assert guided_schema(api, preset) == PERSON
        assert read(await ask(api, response_format=OBJECT, stream=True)) == Message(ADA, [], "stop")
        assert guided_schema(api, preset) == {"type": "object"}

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
        api.engine.answers = steps_of("vllm", "Hello")
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

    async def test_only_the_content_of_a_complete_answer_is_checked(self, gateways: Gateways) -> None:
        message = message_of(await checked(gateways, f"Who? Ada.</think>{ADA}", PERSONS, reasoning="qwen3"))
        assert (message["content"], message["reasoning"]) == (ADA, "Who? Ada.")
        api = await gateways.of()
        api.engine.answers = [step(b'{"name": "A', reason=b"length", is_final=True)]
        choice = (await ask(api, response_format=PERSONS, tools=TOOLS)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "A', "length")

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
