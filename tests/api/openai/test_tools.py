"""Tools and reasoning at OpenAI's chat address, over the presets of LLM backends."""

import asyncio
import json
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from app.api.openai.choices import AT_ONCE
from tests.api.openai.conftest import (
    ASKED,
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
from tests.llm.test_tool_calls import CALLS, FORMATS, written
from tests.pipelines.test_presets import CONFIGS
from tests.toolkit.gateway import Served

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
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names or ("weather",)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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
class TestEachFormat:
    async def test_whole_and_as_a_stream(self, gateways: Gateways, format_: str) -> None:
        api = await gateways.of(format_, says=[*pieces_of("Wait.\n" + written(format_, *CALLS[format_]))])
        answered = await ask(api, tools=TOOLS)
        ids = [call["id"] for call in message_of(answered)["tool_calls"]]
        assert len(set(ids)) == 2
        assert all(len(each) == 9 if format_ == "mistral" else each.startswith("call_") for each in ids)
        for each in (answered, await ask(api, tools=TOOLS, stream=True)):
            assert read(each) == Message("Wait.", EXPECTED, "tool_calls")

    async def test_special_tokens_are_kept_where_the_format_needs_them(self, gateways: Gateways, format_: str) -> None:
        api = await gateways.of(format_, says=["Hello"])
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


class TestMessages:
    async def test_the_template_gets_tools_and_calls(self, gateways: Gateways) -> None:
        api = await gateways.of(says=["It is hot."])
        called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
        messages = [
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "31"}]},
        ]
        assert message_of(await ask(api, messages=messages, tools=TOOLS))["content"] == "It is hot."
        got = prompt(api)
        function = {"name": "weather", "arguments": {"city": "Lima"}}
        assert got["messages"][1:] == [
            {"role": "assistant", "content": "", "tool_calls": [{**called, "function": function}]},
            {"role": "tool", "content": "31", "tool_call_id": "c1"},
        ]
        assert got["tools"][0] == TOOLS[0]
        assert got["tools"][1]["function"] == {"name": "time", "description": "", "parameters": NO_PARAMETERS}

    @pytest.mark.parametrize(
        ("message", "problem"),
        [
            ({"role": "tool", "content": "31"}, "'messages[1].tool_call_id' is required."),
            ({"role": "assistant", "content": None}, "'messages[1].content' is required."),
            ({"role": "user", "content": "a", "tool_calls": ["CALL"]}, "'messages[1].tool_calls' is only allowed with"),
            ({"role": "assistant", "tool_calls": ["["]}, "'messages[...].tool_calls[...].function.arguments' must be"),
            ({"role": "assistant", "tool_calls": ["1"]}, "'messages[...].tool_calls[...].function.arguments' must be"),
            ({"role": "assistant", "tool_calls": ["{},{}"]}, "'messages[...].tool_calls[...].function.arguments' must"),
            (
                {"role": "assistant", "tool_calls": ['{"a": [' + "1," * 20_000 + "1]}"]},
                "'messages[...].tool_calls[...].function.arguments' have more than 16384 elements.",
            ),
        ],
        ids=lambda value: str(value)[:40],
    )
    async def test_wrong_messages_are_refused(self, gateways: Gateways, message: Any, problem: str) -> None:
        api = await gateways.of()
        if "tool_calls" in message:
            functions = [{"name": "f", "arguments": text} for text in message["tool_calls"]]
            message = {**message, "tool_calls": [{"id": "c", "function": each} for each in functions]}
        answered = await ask(api, messages=[*ASKED, message])
        assert refusal(answered)[:2] == (400, "invalid_input")
        assert answered.json()["error"]["message"].startswith(problem)


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(levels: int) -> dict[str, Any]:
    return {"properties": {"a": nested(levels - 1)}} if levels else {}


class TestFields:
    @pytest.mark.parametrize(
        ("body", "param", "problem"),
        [
            ({"tools": [{"type": "function"}]}, "tools[0]", "must have the field"),
            ({"tools": [tool("a b")]}, "tools[0].function.name", "must"),
            ({"tools": [tool(), tool()]}, "tools[1].function.name", "is given twice"),
            ({"tools": [tool(type="string")]}, "tools[0].function.parameters", "must describe an object"),
            ({"tools": [tool(**nested(20))]}, "tools[0].function.parameters", "has more than 32 levels"),
            ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools", "must be a list of length <= 128"),
            ({"tools": [tool(description="x" * 200_000)]}, "tools", "has more than 131072 bytes"),
            ({"tools": [tool(enum=[1] * 20_000)]}, "tools", "has more than 16384 elements"),
            ({"tool_choice": "required"}, "tool_choice", "needs tools"),
            ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice", "names a function that is not in tools"),
            ({"tools": [tool()], "tool_choice": "all"}, "tool_choice", ""),
            (
                {"tools": [tool()], "tool_choice": allowed("auto", "f", "g")},
                "tool_choice",
                "names a function that is not in tools",
            ),
            ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
            ({"reasoning_effort": "high"}, "reasoning_effort", "is not supported by this model"),
            ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "is not supported by this model"),
            (
                {
                    "tools": [tool("f", **{"$defs": {"A": {"type": "string"}}}), tool("g", **{"$defs": {"A": {}}})],
                    "tool_choice": "required",
                },
                "tools",
                "define different types under one name",
            ),
        ],
        ids=lambda value: str(value)[:30],
    )
    async def test_wrong_fields_are_refused(self, gateways: Gateways, body: Any, param: str, problem: str) -> None:
        api = await gateways.of()
        answered = await ask(api, **body)
        assert refusal(answered) == (400, "invalid_input", param)
        assert problem in answered.json()["error"]["message"]
        assert api.engine.requests == []

    async def test_a_model_without_tools_refuses_them(self, gateways: Gateways) -> None:
        api = await gateways.of("null", reasoning="qwen3")
        called = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
        for body, param in (
            ({"tools": TOOLS}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "1"}]}, "messages[0].role"),
            ({"messages": [{"role": "assistant", "tool_calls": [called]}]}, "messages[0].tool_calls"),
        ):
            assert refusal(await ask(api, **body)) == (400, "invalid_input", param)

    async def test_the_fields_are_only_of_chats(self, gateways: Gateways) -> None:
        api = await gateways.of()
        body = {"model": "llama", "prompt": "Hi", "tools": TOOLS}
        assert refusal(await api.client.post("/v1/completions", json=body)) == (400, "invalid_input", "tools")


CALL, TIME = CALLS["hermes"]


@pytest.mark.parametrize("preset", CONFIGS)
class TestToolChoice:
    async def test_none_is_a_text(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset, says=[CALL])
        assert message_of(await ask(api, tools=TOOLS, tool_choice="none"))["content"] == CALL
        assert prompt(api)["tools"] is None

    async def test_auto_is_a_call_or_a_text(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        for body in ({}, {"tool_choice": "auto"}):
            api.engine.answers = steps_of(preset, *pieces_of(CALL))
            assert read(await ask(api, tools=TOOLS, **body)) == Message("", EXPECTED[:1], "tool_calls")
            api.engine.answers = steps_of(preset, "Hel", "lo")
            assert message_of(await ask(api, tools=TOOLS, **body))["content"] == "Hello"

    async def test_one_call_at_most(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset, says=[CALL, TIME])
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


async def test_wrong_arguments_of_a_required_call_are_an_error(gateways: Gateways) -> None:
    api = await gateways.of("mistral", preset="tensorrt_llm_api", says=["[TOOL_CALLS]weather[ARGS]{city}"])
    assert refusal(await ask(api, tools=TOOLS, tool_choice="required"))[:2] == (502, "tool_call_missing")


async def test_a_required_call_that_is_too_long_has_the_reason_length(gateways: Gateways) -> None:
    api = await gateways.of()
    api.engine.answers = [step(b'{"city": "Li', reason=b"length", is_final=True)]
    choice = (await ask(api, tools=TOOLS, tool_choice=NAMED)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Li'


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
    async def test_whole_and_as_a_stream(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="qwen3", says=pieces_of("Hm.\n</think>\n\nYes."))
        for stream in (False, True):
            assert read(await ask(api, stream=stream)) == Message("Yes.", [], "stop", "Hm.")

    async def test_with_a_call(self, gateways: Gateways) -> None:
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

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
            ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
            ({"chat_template_kwargs": {"fixed": 2}}, "chat_template_kwargs.fixed"),
            ({"chat_template_kwargs": {"range": 2}}, "chat_template_kwargs.range"),
            ({"chat_template_kwargs": {"a": [1] * 100}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs"),
            ({"reasoning_effort": "much"}, "reasoning_effort"),
        ],
        ids=lambda value: str(value)[:40],
    )
    async def test_wrong_variables_are_refused(self, gateways: Gateways, body: Any, param: str) -> None:
        api = await gateways.of(reasoning="qwen3")
        assert refusal(await ask(api, **body)) == (400, "invalid_input", param)
