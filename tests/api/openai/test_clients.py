"""Requests of OpenAI's clients, as NVIDIA's tests of its front end send them."""

import json
from typing import Any

import httpx
import pytest

from tests.api.openai.conftest import chunks, refusal
from tests.api.openai.test_backends import step
from tests.api.openai.test_tools import NAMED, TOOLS, Gateways, chat, gateways, message_of, sampling, steps_of
from tests.llm.test_tool_calls import CALLS, written
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import model, response, tensor

__all__ = ["gateways"]
SENT = {"frequency_penalty": 0.5, "logit_bias": {"0": 1}, "logprobs": True, "temperature": 0.7, "top_logprobs": 2}
CONFIG = """
pipelines:
  plain:
    model: echo
    inputs: {line: {tensor: LINE, kind: text}}
    outputs: {answer: {tensor: ANSWER, kind: text}}
    parameters: {top_p: {type: number, maximum: 1, optional: true}}
    openai:
      completions: {prompt: line, text: answer}
      chat: {prompt: line, text: answer, template_text: "{{ messages[0].content }}"}
      ignored: [frequency_penalty, logit_bias, logprobs, temperature, top_logprobs, top_p]
"""


ECHO = model("LINE BYTES [1]", "ANSWER BYTES [1]", name="echo")

plain = gateway_fixture(CONFIG, ECHO, answers=[response(tensor("ANSWER", "BYTES", [b"Hello"]))])


async def asked(api: Served, address: str, **body: Any) -> httpx.Response:
    text = {"messages": [{"role": "user", "content": "Hi"}]} if address == "chat/completions" else {"prompt": "Hi"}
    return await api.client.post(f"/v1/{address}", json={"model": "plain", **text, **body})


ADDRESSES = ("completions", "chat/completions")


@pytest.mark.parametrize("address", ADDRESSES)
async def test_ignored_fields_are_accepted_and_others_are_400(plain: Served, address: str) -> None:
    for body in (SENT, {"stop": []}):
        answer = await asked(plain, address, **body)
        assert (answer.status_code, "Hello" in answer.text) == (200, True)
    assert refusal(await asked(plain, address, seed=1))[::2] == (400, "seed")
    # A field of the pipeline keeps its effect.
    assert refusal(await asked(plain, address, top_p=1.5))[::2] == (400, "top_p")


async def test_max_completion_tokens_precede_max_tokens(gateways: Gateways) -> None:
    api = await gateways.of()
    api.engine.answers = steps_of("vllm", "Hello")
    assert message_of(await chat(api, max_tokens=100, max_completion_tokens=1))["content"] == "Hello"
    assert sampling(api)["max_tokens"] == 1


@pytest.mark.parametrize(
    ("choice", "reason"), [(NAMED, "stop"), ("auto", "tool_calls"), ("required", "tool_calls"), (None, "tool_calls")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_finish_reason_of_a_call(gateways: Gateways, choice: Any, reason: str, *, stream: bool) -> None:
    api = await gateways.of("hermes", preset="tensorrt_llm" if choice is None else "vllm")
    text = written("hermes", CALLS["hermes"][0])
    if choice in (NAMED, "required"):  # the backend is guided
        arguments = {"city": "Lima"}
        text = json.dumps(arguments if choice == NAMED else [{"name": "weather", "parameters": arguments}])
    api.engine.answers = steps_of("tensorrt_llm" if choice is None else "vllm", text)
    answer = await chat(api, tools=TOOLS, tool_choice=choice, stream=stream)
    choices = [each["choices"][0] for each in chunks(answer)[:-1]] if stream else [answer.json()["choices"][0]]
    assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_that_the_model_does_not_have_are_null(gateways: Gateways, *, stream: bool) -> None:
    api = await gateways.of()
    api.engine.answers = [step(b"Hello", reason=b"stop", is_final=True)]
    body = {"model": "llama", "prompt": "Hi", "logprobs": 0, "stream": stream}
    for answer in (
        await api.client.post("/v1/completions", json=body),
        await chat(api, logprobs=True, top_logprobs=0, stream=stream),
    ):
        assert answer.status_code == 200, answer.text
        events = chunks(answer)[:-1] if stream else [answer.json()]
        assert [event["choices"][0]["logprobs"] for event in events] == [None] * len(events)
