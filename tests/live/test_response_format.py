"""``response_format`` with OpenAI's client, over a stand-in of vLLM that writes what the prompt asks for."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.live.test_tools import asking, client
from tests.live.tool_models import TEXTS

__all__ = ["client"]


class City(BaseModel):
    name: str
    population: int
    parts: list["City"] = []


LIMA = City(name="Lima", population=10_000_000, parts=[City(name="Z\u00fcrich", population=1)])
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_the_clients_parse_returns_the_model(client: OpenAI) -> None:
    """The backend gets the schema, which names itself."""
    messages = asking(LIMA.model_dump_json())
    for tools in (openai.omit, [WEATHER]):
        answer = client.chat.completions.parse(model="mistral", messages=messages, response_format=City, tools=tools)
        assert answer.choices[0].message.parsed == LIMA


def test_the_clients_stream_adds_up_to_the_model(client: OpenAI) -> None:
    messages = asking(LIMA.model_dump_json())
    with client.chat.completions.stream(model="mistral", messages=messages, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == LIMA


def test_a_call_wins_over_the_format(client: OpenAI) -> None:
    messages = asking(TEXTS["mistral"].removeprefix("Wait."))
    answer = client.chat.completions.parse(model="mistral", messages=messages, response_format=City, tools=[WEATHER])
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert json.loads(calls[0].function.arguments) == {"city": "Z\u00fcrich"}


def test_an_answer_that_does_not_fit_is_an_error(client: OpenAI) -> None:
    """Tools that may be called exclude guiding, so the gateway checks the answer."""
    asked: Any = {"model": "mistral", "messages": asking('{"name": "Lima"}'), "tools": [WEATHER]}
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.parse(**asked, response_format=City)
    assert caught.value.code == "response_format_mismatch"
    stream = client.chat.completions.stream(**asked, response_format=City)
    with pytest.raises(openai.APIError) as broken, stream as events:
        events.until_done()
    assert broken.value.code == "response_format_mismatch"
