"""Fields of OpenAI's API that do not change the answer are accepted; other fields are errors."""

from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.embedding_create_params import EmbeddingCreateParams

from app.api.openai.requests import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS
from tests.api.openai.conftest import ECHO, Api, refusal
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import response, tensor

OF_EMBEDDINGS: dict[str, Any] = {
    "metadata": {"team": "search"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "hash",
    "service_tier": "flex",
    "store": True,
    "user": "me",
}
OF_TEXTS: dict[str, Any] = OF_EMBEDDINGS | {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "auto",
    "functions": [],
    "ignore_eos": False,
    "logit_bias": {},
    "logprobs": False,
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "def"},
    "presence_penalty": 0,
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "verbosity": "low",
}


def parts(text: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Hi", **text}]}]


def test_every_field_of_embeddings_is_decided() -> None:
    """test_fields.py has those of chats and completions."""
    read = {"model", "input", "dimensions", "encoding_format"}
    assert set(EmbeddingCreateParams.__annotations__) <= read | set(NEUTRAL_OF_EMBEDDINGS)


def test_the_tables_of_this_file_are_complete() -> None:
    assert set(OF_TEXTS) == set(NEUTRAL_OF_TEXTS)
    assert set(OF_EMBEDDINGS) == set(NEUTRAL_OF_EMBEDDINGS)


async def test_neutral_fields_of_embeddings_are_accepted(api: Api) -> None:
    api.engine.answers = [response(tensor("VECTOR", "FP32", [[1, 2]]), tensor("TOKENS", "INT32", [[1]]))]
    body = {"model": "embed", "input": "Hi", "encoding_format": "float"} | OF_EMBEDDINGS
    answer = await api.client.post("/v1/embeddings", json=body)
    assert answer.json()["data"][0]["embedding"] == [1.0, 2.0]


async def test_a_text_part_may_be_a_breakpoint_of_the_cache(chat: Any) -> None:
    answer = await chat(messages=parts({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"user": 5}, "'user' must be a string, not an integer."),
        ({"user": "x" * 1025}, "'user' must be a string of length <= 1024."),
        ({"store": "yes"}, "'store' must be true or false, not a string."),
        ({"metadata": []}, "'metadata' must be an object, not a list."),
        ({"metadata": {str(each): "" for each in range(17)}}, "'metadata' must be an object of length <= 16."),
        ({"metadata": {"a": "x" * 513}}, "'metadata[...]' must be a string of length <= 512."),
        ({"prediction": {"content": [1] * 100}}, "'prediction' has more than 64 elements."),
        ({"verbosity": "loud"}, "'verbosity' is not one of the allowed values."),
        ({"ignore_eos": True}, "'ignore_eos' is not supported by this model."),
        ({"min_tokens": 4}, "'min_tokens' is not supported by this model."),
        ({"n": 17}, "'n' must be an integer <= 16."),
        ({"reasoning_effort": "high"}, "'reasoning_effort' is not supported by this model."),
        ({"functions": [{"name": "f"}]}, "'functions' is not supported by this model."),
        ({"top_logprobs": 2}, "'top_logprobs' is not supported by this model."),
        ({"audio": {"voice": "x"}}, "'audio' is not supported by this model."),
        ({"moderation": {"model": "x"}}, "'moderation' is not supported by this model."),
        ({"web_search_options": {}}, "'web_search_options' is not supported by this model."),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_other_values_are_refused_with_the_name(chat: Any, body: dict[str, Any], expected: str) -> None:
    answer = await chat(**body)
    assert refusal(answer)[:2] == (400, "invalid_input")
    assert answer.json()["error"]["message"] == expected


async def test_the_openapi_document_has_the_accepted_values(api: Api) -> None:
    document = (await api.client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["title"] == "write"
    request = {"model": "write", "messages": parts({})}
    jsonschema.validate(request | OF_TEXTS, body)
    for wrong in ({"user": 5}, {"metadata": {"a": "x" * 513}}, {"verbosity": "loud"}, {"ignore_eos": True}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(request | wrong, body)


SENT = {"frequency_penalty": 0.5, "logit_bias": {"0": 1}, "logprobs": True, "temperature": 0.7, "top_logprobs": 2}
PLAIN = """
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


plain = gateway_fixture(PLAIN, ECHO, answers=[response(tensor("ANSWER", "BYTES", [b"Hello"]))])


@pytest.mark.parametrize(
    ("address", "text"),
    [("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})],
    ids=["completions", "chat"],
)
async def test_ignored_fields_are_accepted_and_others_are_400(plain: Served, address: str, text: Any) -> None:
    async def asked(**body: Any) -> httpx.Response:
        return await plain.client.post(f"/v1/{address}", json={"model": "plain", **text, **body})

    for body in (SENT, {"stop": []}):
        answer = await asked(**body)
        assert (answer.status_code, "Hello" in answer.text) == (200, True)
    assert refusal(await asked(seed=1))[::2] == (400, "seed")
    # A field of the pipeline keeps its effect.
    assert refusal(await asked(top_p=1.5))[::2] == (400, "top_p")
