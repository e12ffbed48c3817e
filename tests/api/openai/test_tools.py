"""Tools and reasoning at OpenAI's chat address, over the presets of LLM backends."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from app.api.bodies import Limits
from app.api.openai.choices import AT_ONCE
from app.core.inference import InferenceResponse
from tests.api.openai.conftest import chunks, refusal
from tests.api.openai.test_backends import step
from tests.api.openai.test_fields import engine_step
from tests.llm.test_tool_calls import CALLS, FORMATS, written
from tests.pipelines.test_presets import CONFIGS, answer
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served

CONFIG = """
pipelines:
  llama:
    model: model
    preset: PRESET
    warmup: false
    openai:
      chat:
        variables: {fixed: 1}
        template_text: >-
          {{ {"messages": messages, "tools": tools, "effort": reasoning_effort | default(none),
          "deep": deep | default(none)} | tojson }}<think>
      tools: FORMAT
      reasoning: REASONING
"""
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
ASKED = [{"role": "user", "content": "Hi"}]


def steps_of(preset: str, *pieces: str) -> list[InferenceResponse]:
    """The responses of a backend that writes these pieces."""
    last = len(pieces) - 1
    if preset == "vllm":
        reasons = [b"stop" if index == last else b"None" for index in range(len(pieces))]
        return [
            step(piece.encode(), reason=why, is_final=why == b"stop")
            for piece, why in zip(pieces, reasons, strict=True)
        ]
    if preset == "tensorrt_llm":
        return [engine_step(piece.encode(), is_final=index == last) for index, piece in enumerate(pieces)]
    return [answer("".join(pieces[: index + 1]), is_final=index == last) for index in range(len(pieces))]


class Gateways:
    """A gateway for each combination of keys, made when a test asks for it."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    async def of(self, format_: str = "hermes", preset: str = "vllm", reasoning: str = "none") -> Served:
        text = CONFIG.replace("PRESET", preset).replace("FORMAT", format_).replace("REASONING", reasoning)
        path = self._folder / "gateway.yaml"
        path.write_text(text)
        return await self._stack.enter_async_context(
            served(FakeEngine.of(CONFIGS[preset]), path, limits=Limits(1024 * 1024))
        )


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[Gateways]:
    async with AsyncExitStack() as stack:
        yield Gateways(stack, tmp_path)


async def chat(api: Served, *, messages: Sequence[Mapping[str, Any]] = ASKED, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/chat/completions", json={"model": "llama", "messages": messages} | body)


def inputs(api: Served) -> dict[str, Any]:
    return {each.name: each.array.reshape(-1)[0] for each in api.engine.requests[-1].inputs}


def prompt(api: Served) -> Any:
    """What the template got."""
    return json.loads(inputs(api)["text_input"].removesuffix(b"<think>"))


def sampling(api: Served) -> Any:
    return json.loads(inputs(api)["sampling_parameters"])


def pieces_of(text: str, size: int = 3) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def message_of(answered: httpx.Response) -> Any:
    assert answered.status_code == 200, answered.text
    return answered.json()["choices"][0]["message"]


def joined(answered: httpx.Response) -> tuple[dict[str, Any], str]:
    """The message that the deltas of a stream add up to, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    *events, done = chunks(answered)
    assert done == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(message["calls"]), "function")
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message, choices[-1]["finish_reason"]


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


EXPECTED = [("weather", ARGUMENTS), ("time", {})]


@pytest.mark.parametrize("format_", FORMATS)
class TestEachFormat:
    async def test_whole_and_as_a_stream(self, gateways: Gateways, format_: str) -> None:
        api = await gateways.of(format_, reasoning="gpt_oss" if format_ == "gpt_oss" else "none")
        api.engine.answers = steps_of("vllm", *pieces_of("Wait.\n" + written(format_, *CALLS[format_])))
        answered = await chat(api, tools=TOOLS)
        message = message_of(answered)
        assert (message["content"], calls_of(message)) == ("Wait.", EXPECTED)
        assert answered.json()["choices"][0]["finish_reason"] == "tool_calls"
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        assert all(len(each) == 9 if format_ == "mistral" else each.startswith("call_") for each in ids)
        whole, reason = joined(await chat(api, tools=TOOLS, stream=True))
        assert ([(name, json.loads(text)) for name, text in whole["calls"]], reason) == (EXPECTED, "tool_calls")
        assert whole["content"] == "Wait."

    async def test_special_tokens_are_kept_where_the_format_needs_them(self, gateways: Gateways, format_: str) -> None:
        api = await gateways.of(format_, reasoning="gpt_oss" if format_ == "gpt_oss" else "none")
        api.engine.answers = steps_of("vllm", "Hello")
        assert message_of(await chat(api)) == {"role": "assistant", "content": "Hello", "refusal": None}
        assert sampling(api).get("skip_special_tokens") == (False if format_ in ("mistral", "gpt_oss") else None)
        assert message_of(await chat(api, skip_special_tokens=True))
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
        api = await gateways.of(format_, reasoning="gpt_oss" if format_ == "gpt_oss" else "none")
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
        answered = await chat(api, tools=TOOLS, stream=stream)
        is_answered = True
        await turning
        assert turns >= LARGE // AT_ONCE - pieces
        if stream:
            message, _ = joined(answered)
            calls = [(name, json.loads(arguments)) for name, arguments in message["calls"]]
        else:
            message = message_of(answered)
            calls = calls_of(message)
        assert message["content"] == before.rstrip()
        assert calls == EXPECTED

    async def test_many_small_pieces_do_not_stay_behind_a_large_one(self, gateways: Gateways, format_: str) -> None:
        api = await gateways.of(format_, reasoning="gpt_oss" if format_ == "gpt_oss" else "none")
        words = [f"word {number} " for number in range(200)]
        api.engine.answers = steps_of("vllm", "x" * LARGE, *words, *pieces_of(written(format_, *CALLS[format_])))
        *events, _done = chunks(await chat(api, tools=TOOLS, stream=True))
        contents = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(contents) == ("x" * LARGE + "".join(words)).rstrip()
        assert max(map(len, contents)) <= AT_ONCE


class TestMessages:
    async def test_the_template_gets_tools_and_calls(self, gateways: Gateways) -> None:
        api = await gateways.of()
        api.engine.answers = steps_of("vllm", "It is hot.")
        called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
        messages = [
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "31"}]},
        ]
        assert message_of(await chat(api, messages=messages, tools=TOOLS))["content"] == "It is hot."
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
        answered = await chat(api, messages=[*ASKED, message])
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
        answered = await chat(api, **body)
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
            assert refusal(await chat(api, **body)) == (400, "invalid_input", param)

    async def test_the_fields_are_only_of_chats(self, gateways: Gateways) -> None:
        api = await gateways.of()
        body = {"model": "llama", "prompt": "Hi", "tools": TOOLS}
        assert refusal(await api.client.post("/v1/completions", json=body)) == (400, "invalid_input", "tools")


CALL, TIME = CALLS["hermes"]


@pytest.mark.parametrize("preset", CONFIGS)
class TestToolChoice:
    async def test_none_is_a_text(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        api.engine.answers = steps_of(preset, CALL)
        assert message_of(await chat(api, tools=TOOLS, tool_choice="none"))["content"] == CALL
        assert prompt(api)["tools"] is None

    async def test_auto_is_a_call_or_a_text(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        for body in ({}, {"tool_choice": "auto"}):
            api.engine.answers = steps_of(preset, *pieces_of(CALL))
            message = message_of(await chat(api, tools=TOOLS, **body))
            assert (message["content"], calls_of(message)) == (None, EXPECTED[:1])
            api.engine.answers = steps_of(preset, "Hel", "lo")
            assert message_of(await chat(api, tools=TOOLS, **body))["content"] == "Hello"

    async def test_one_call_at_most(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        api.engine.answers = steps_of(preset, CALL, TIME)
        assert calls_of(message_of(await chat(api, tools=TOOLS, parallel_tool_calls=False))) == EXPECTED[:1]

    async def test_required_is_a_call(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        calls = [{"name": name, "parameters": arguments} for name, arguments in EXPECTED]
        text = CALL + TIME if preset == "tensorrt_llm_api" else json.dumps(calls)
        for stream in (False, True):
            api.engine.answers = steps_of(preset, *pieces_of(text))
            answered = await chat(api, tools=TOOLS, tool_choice="required", stream=stream)
            if stream:
                found = [(name, json.loads(arguments)) for name, arguments in joined(answered)[0]["calls"]]
            else:
                found = calls_of(message_of(answered))
            assert found == EXPECTED
        if preset == "tensorrt_llm_api":
            return
        schema = guided_schema(api, preset)
        jsonschema.validate([{"name": "time", "parameters": {}}], schema)
        for wrong in ([], [{"name": "other", "parameters": {}}], [{"name": "weather", "parameters": {}}]):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, schema)

    async def test_a_name_is_a_call_of_this_function(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        text = CALL if preset == "tensorrt_llm_api" else json.dumps(ARGUMENTS)
        api.engine.answers = steps_of(preset, *pieces_of(text))
        answered = await chat(api, tools=TOOLS, tool_choice=NAMED)
        assert calls_of(message_of(answered)) == EXPECTED[:1]
        if preset != "tensorrt_llm_api":
            assert guided_schema(api, preset) == WEATHER

    async def test_only_allowed_tools_are_called(self, gateways: Gateways, preset: str) -> None:
        api = await gateways.of(preset=preset)
        api.engine.answers = steps_of(preset, CALL, TIME)
        assert calls_of(message_of(await chat(api, tools=TOOLS, tool_choice=allowed("auto")))) == EXPECTED[:1]
        assert [each["function"]["name"] for each in prompt(api)["tools"]] == ["weather"]
        name, arguments = EXPECTED[0]
        guided = json.dumps([{"name": name, "parameters": arguments}])
        api.engine.answers = steps_of(preset, CALL if preset == "tensorrt_llm_api" else guided)
        assert calls_of(message_of(await chat(api, tools=TOOLS, tool_choice=allowed("required")))) == EXPECTED[:1]
        api.engine.answers = steps_of(preset, TIME)
        answered = await chat(api, tools=TOOLS, tool_choice=allowed("required"))
        assert refusal(answered)[:2] == (502, "tool_call_missing")

    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "name"])
    async def test_a_missing_call_is_an_error(self, gateways: Gateways, preset: str, choice: Any) -> None:
        api = await gateways.of(preset=preset)
        api.engine.answers = steps_of(preset, "I will ", TIME.replace("time", "whether"))
        answered = await chat(api, tools=TOOLS, tool_choice=choice)
        assert refusal(answered)[:2] == (502, "tool_call_missing")
        *_, last = chunks(await chat(api, tools=TOOLS, tool_choice=choice, stream=True))
        assert last["error"]["code"] == "tool_call_missing"


def guided_schema(api: Served, preset: str) -> Any:
    """The schema that the backend got."""
    if preset == "vllm":
        return json.loads(sampling(api)["structured_outputs"])["json"]
    assert inputs(api)["guided_decoding_guide_type"] == b"json_schema"
    return json.loads(inputs(api)["guided_decoding_guide"])


async def test_wrong_arguments_of_a_required_call_are_an_error(gateways: Gateways) -> None:
    api = await gateways.of("mistral", preset="tensorrt_llm_api")
    api.engine.answers = steps_of("tensorrt_llm_api", "[TOOL_CALLS]weather[ARGS]{city}")
    assert refusal(await chat(api, tools=TOOLS, tool_choice="required"))[:2] == (502, "tool_call_missing")


async def test_a_required_call_that_is_too_long_has_the_reason_length(gateways: Gateways) -> None:
    api = await gateways.of()
    api.engine.answers = [step(b'{"city": "Li', reason=b"length", is_final=True)]
    choice = (await chat(api, tools=TOOLS, tool_choice=NAMED)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Li'


async def test_definitions_of_several_functions_are_one_list(gateways: Gateways) -> None:
    api = await gateways.of()
    api.engine.answers = steps_of("vllm", '[{"name": "f", "parameters": {}}]')
    tools = [
        tool("f", **{"$defs": {"A": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}),
        tool("g", **{"$defs": {"A": {"type": "string"}, "B": {}}}),
    ]
    await chat(api, tools=tools, tool_choice="required", parallel_tool_calls=False)
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
    answered = await chat(api, **{name: value for name, value in body.items() if name != "model"})
    jsonschema.validate(answered.json(), answers)
    for chunk in chunks(await chat(api, messages=messages, tools=TOOLS, tool_choice=NAMED, stream=True))[:-1]:
        jsonschema.validate(chunk, {**answers, "$ref": "#/components/schemas/OpenAIChatCompletionChunk"})
    for wrong in ({"tools": [{"type": "f"}]}, {"tool_choice": "all"}, {"messages": [{"role": "bot"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body | wrong, schema)


class TestReasoning:
    async def test_whole_and_as_a_stream(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="qwen3")
        api.engine.answers = steps_of("vllm", *pieces_of("Hm.\n</think>\n\nYes."))
        message = message_of(await chat(api))
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Yes.", "Hm.", "Hm.")
        whole, reason = joined(await chat(api, stream=True))
        assert (whole["content"], whole["reasoning"], whole["reasoning_content"], reason) == (
            "Yes.",
            "Hm.",
            "Hm.",
            "stop",
        )

    async def test_with_a_call(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="[<think>, </think>]")
        api.engine.answers = steps_of("vllm", *pieces_of(f"Hm.</think>{CALL}"))
        message = message_of(await chat(api, tools=TOOLS))
        assert (message["content"], message["reasoning"], calls_of(message)) == (None, "Hm.", EXPECTED[:1])

    async def test_the_template_gets_the_variables_and_earlier_reasoning(self, gateways: Gateways) -> None:
        api = await gateways.of(reasoning="qwen3")
        api.engine.answers = steps_of("vllm", "Hm.</think>Yes.")
        earlier = {"role": "assistant", "content": "A", "reasoning": "B", "reasoning_content": "B", "tool_calls": None}
        body = {"reasoning_effort": "high", "chat_template_kwargs": {"deep": {"a": [1]}}}
        message_of(await chat(api, messages=[*ASKED, earlier], **body))
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
        assert refusal(await chat(api, **body)) == (400, "invalid_input", param)
