"""Tools and reasoning with OpenAI's client, over a stand-in of vLLM that writes what the prompt asks for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from tests.live.tool_models import TEXTS, running_tool_models

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CITY = {"city": "Z\u00fcrich"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[OpenAI]:
    with (
        running_tool_models(tmp_path_factory.mktemp("tools"), models_venv) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asking(text: str) -> Any:
    return [{"role": "user", "content": f"Please write: {text}"}]


def check(message: ChatCompletionMessage, name: str) -> None:
    assert message.tool_calls is not None
    assert [call.type for call in message.tool_calls] == ["function"]
    assert message.tool_calls[0].type == "function"
    function = message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments), message.content) == ("weather", CITY, "Wait.")
    extra = message.model_extra or {}
    assert extra.get("reasoning_content") == (None if name == "mistral" else "Hm.")


@pytest.mark.parametrize("name", TEXTS)
class TestEachFormat:
    def test_a_call(self, client: OpenAI, name: str) -> None:
        answer = client.chat.completions.create(model=name, messages=asking(TEXTS[name]), tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        check(answer.choices[0].message, name)

    def test_the_clients_helper_adds_up_the_same_message(self, client: OpenAI, name: str) -> None:
        with client.chat.completions.stream(model=name, messages=asking(TEXTS[name]), tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            whole = stream.get_final_completion().choices[0]
        assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert whole.finish_reason == "tool_calls"
        check(whole.message, name)

    def test_a_named_function(self, client: OpenAI, name: str) -> None:
        messages = asking(json.dumps(CITY))
        answer = client.chat.completions.create(model=name, messages=messages, tools=TOOLS, tool_choice=NAMED)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].type == "function"
        assert json.loads(calls[0].function.arguments) == CITY

    def test_a_missing_call_is_an_error(self, client: OpenAI, name: str) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=name, messages=asking("No."), tools=TOOLS, tool_choice="required")
        assert caught.value.code == "tool_call_missing"


def test_the_result_of_a_call_goes_back_to_the_model(client: OpenAI) -> None:
    messages = asking(TEXTS["hermes"])
    called = client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS).choices[0].message
    assert called.tool_calls is not None
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": " 31 degrees"}
    history = [{"role": "user", "content": "Please write: "}, called.model_dump(), result]
    answer: Any = client.chat.completions.create(model="hermes", messages=history, tools=TOOLS)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "<called Z\u00fcrich>Wait. 31 degrees"
