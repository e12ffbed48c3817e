"""Requests that OpenAI's addresses refuse, and errors in OpenAI's format."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.error_table import ROW_BY_ERROR
from app.api.openai.requests import openai_error_response
from app.core import errors
from app.core.errors import FieldProblem, GatewayError
from app.pipelines.body import MAX_PROBLEMS
from tests.api.openai import conftest
from tests.api.openai.conftest import (
    ADDRESSES,
    ASKED,
    BODIES,
    ECHO,
    EMBEDDER,
    EMBEDS,
    NAMED,
    WRITER,
    allowed,
    refusal,
)
from tests.pipelines.test_presets import CONFIGS
from tests.toolkit.engine import error_of
from tests.toolkit.gateway import Served, gateway_fixture

CONFIG = f"""{conftest.CONFIG}
  llm: &llm
    model: vllm
    preset: vllm
    warmup: false
    adapters: {{french: {{lora_name: fr-v2}}}}
    openai: {{chat: &chat {{template_text: "{{{{ messages[0].content }}}}", variables: {{fixed: 1}}}}}}
  tools: {{<<: *llm, openai: {{chat: *chat, tools: hermes}}}}
  thinks: {{<<: *llm, openai: {{chat: *chat, reasoning: qwen3}}}}
  api: {{model: api, preset: tensorrt_llm_api, warmup: false, openai: {{chat: *chat}}}}
  vectors: {{model: vectors, preset: vllm_embeddings, warmup: false}}
"""
LLMS = (replace(CONFIGS["vllm"], name="vllm"), replace(CONFIGS["tensorrt_llm_api"], name="api"))


api = gateway_fixture(CONFIG, WRITER, ECHO, EMBEDDER, *LLMS, replace(EMBEDS, name="vectors"))


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(levels: int) -> dict[str, Any]:
    return {"properties": {"a": nested(levels - 1)}} if levels else {}


def message(**members: Any) -> dict[str, Any]:
    """A body with a second message; ``calls``: the arguments of its calls."""
    if "calls" in members:
        functions = [{"name": "f", "arguments": text} for text in members.pop("calls")]
        members["tool_calls"] = [{"id": "c", "function": each} for each in functions]
    return {"messages": [{"role": "user", "content": "Hi"}, members]}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": value}}}


DEFINED_TWICE = [tool("f", **{"$defs": {"A": {"type": "string"}}}), tool("g", **{"$defs": {"A": {}}})]
MUST_CALL = {"response_format": {"type": "json_object"}, "tools": [tool("weather")]}
ARGUMENTS = "messages[...].tool_calls[...].function.arguments"
FORMATS = [
    ({"response_format": {"type": "xml"}}, "response_format.type: is not one of the allowed values"),
    ({"response_format": {"type": "json_schema"}}, "response_format: must have the field 'json_schema'"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format: has a field that is not supported"),
    (schema(nested(20)), "response_format.json_schema.schema: has more than 32 levels"),
    (schema({"enum": ["x" * 200_000]}), "response_format: has more than 131072 bytes"),
    (schema({"enum": [1] * 20_000}), "response_format: has more than 16384 elements"),
]
OUTSIDE = "response_format.json_schema.schema: must refer only to itself: a $ref begins with #"
REFUSED: dict[tuple[str, str], list[tuple[Any, str]]] = {
    ("completions", "write"): [
        ({"n": True}, "n: must be an integer, not true or false"),
        ({"n": "secret"}, "n: must be an integer, not a string"),
        ({"max_tokens": 65}, "max_tokens: must be an integer <= 64"),
        ({"max_tokens": "9"}, "max_tokens: must be an integer, not a string"),
        ({"stop": ["a"] * 5}, "stop: must be a list of length <= 4"),
        ({"stop": [""]}, "stop[0]: must be a string of length >= 1"),
        ({"stop": [["secret"]]}, "stop[0]: must be a string, not a list"),
        ({"stop": "x" * 257}, "stop: must be a string of length <= 256"),
        ({"stream": "yes"}, "stream: must be true or false, not a string"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is only allowed with stream: true"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options: has a field that is not supported"),
        ({"prompt": None}, "prompt: is required"),
        ({"prompt": [1, 2]}, "prompt[0]: must be a string, not an integer"),
        ({"prompt": ["a", "b"]}, "prompt: takes one item in a request; several need `batch: true` in gateway.yaml"),
        ({"prompt": {"secret": 1}}, "prompt: must be a string or a list, not an object"),
        ({"seed": "secret"}, "seed: must be an integer, not a string"),
        ({"model": None}, "model: is required"),
        ({"model": 5}, "model: must be a string, not an integer"),
    ],
    # The caller's name of a field, and not the pipeline's.
    ("completions", "echo"): [({"max_tokens": 10}, "max_tokens: must be an integer <= 9")],
    # Tools that score texts ask for both, and would take those of the answer for those of the prompt.
    ("completions", "llm"): [
        ({"echo": True, "logprobs": 1}, "echo: is not allowed with logprobs, because the model has none for the prompt")
    ],
    ("chat", "write"): [
        ({"max_completion_tokens": 65}, "max_completion_tokens: must be an integer <= 64"),
        ({"messages": None}, "messages: is required"),
        ({"messages": []}, "messages: must be a list of length >= 1"),
        (message(role="tool", content="x"), "messages[1].role: is not one of the allowed values"),
        (message(role="user"), "messages[1]: must have the field 'content'"),
        (
            message(role="user", content=[{"type": "image_url"}]),
            "messages[1].content[0]: must have the field 'image_url'",
        ),
        (message(role="user", content="x", secret=1), "messages[1]: has a field that is not supported"),
        (message(role="user", content=5), "messages[1].content: must be a string or a list, not an integer"),
        ({"user": 5}, "user: must be a string, not an integer"),
        ({"user": "x" * 1025}, "user: must be a string of length <= 1024"),
        ({"store": "yes"}, "store: must be true or false, not a string"),
        ({"metadata": []}, "metadata: must be an object, not a list"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata: must be an object of length <= 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]: must be a string of length <= 512"),
        ({"prediction": {"content": [1] * 100}}, "prediction: has more than 64 elements"),
        ({"verbosity": "loud"}, "verbosity: is not one of the allowed values"),
        ({"n": 17}, "n: must be an integer <= 16"),
    ],
    ("chat", "llm"): [
        ({"messages": ASKED * 16_384}, "messages: has more than 16384 elements"),
        ({"temperature": 3}, "temperature: must be a number <= 2.0"),
        ({"max_tokens": 0}, "max_tokens: must be an integer >= 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: must be an integer >= 1"),
        ({"n": 0}, "n: must be an integer >= 1"),
        ({"top_logprobs": 2}, "top_logprobs: is only allowed with logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be an integer <= 20"),
        (
            {"include_stop_str_in_output": 1, "stop": "l"},
            "include_stop_str_in_output: must be true or false, not an integer",
        ),
        *FORMATS,
    ],
    ("chat", "tools"): [
        (message(role="tool", content="31"), "messages[1].tool_call_id: is required"),
        (message(role="assistant", content=None), "messages[1].content: is required"),
        (
            message(role="user", content="a", calls=["{}"]),
            "messages[1].tool_calls: is only allowed with the role assistant",
        ),
        *((message(role="assistant", calls=[each]), f"{ARGUMENTS}: must be JSON objects") for each in "[1"),
        (message(role="assistant", calls=["{},{}"]), f"{ARGUMENTS}: must be JSON objects"),
        (
            message(role="assistant", calls=['{"a": [' + "1," * 20_000 + "1]}"]),
            f"{ARGUMENTS}: have more than 16384 elements",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]: must have the field 'function'"),
        (
            {"tools": [tool("a b")]},
            "tools[0].function.name: must be a string matching regex '^[a-zA-Z0-9_-]{1,64}$'",
        ),
        ({"tools": [tool(), tool()]}, "tools[1].function.name: is given twice"),
        ({"tools": [tool(type="string")]}, "tools[0].function.parameters: must describe an object"),
        ({"tools": [tool(**nested(20))]}, "tools[0].function.parameters: has more than 32 levels"),
        ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools: must be a list of length <= 128"),
        ({"tools": [tool(description="x" * 200_000)]}, "tools: has more than 131072 bytes"),
        ({"tools": [tool(enum=[1] * 20_000)]}, "tools: has more than 16384 elements"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice: names a function that is not in tools"),
        ({"tools": [tool()], "tool_choice": "all"}, "tool_choice: is not one of the allowed values"),
        (
            {"tools": [tool()], "tool_choice": allowed("auto", "f", "g")},
            "tool_choice: names a function that is not in tools",
        ),
        ({"tools": DEFINED_TWICE, "tool_choice": "required"}, "tools: define different types under one name"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: must be true or false, not an integer"),
        *(
            (
                {**MUST_CALL, "tool_choice": choice},
                "response_format: is not allowed with a tool_choice that requires a call",
            )
            for choice in ("required", NAMED)
        ),
    ],
    ("chat", "thinks"): [
        *(
            ({"chat_template_kwargs": {name: 2}}, f"chat_template_kwargs.{name}: cannot be set")
            for name in ("messages", "bos_token", "fixed", "range")
        ),
        ({"chat_template_kwargs": {"a": [1] * 100}}, "chat_template_kwargs: has more than 64 elements"),
        ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs: has more than 4096 bytes"),
        ({"reasoning_effort": "much"}, "reasoning_effort: is not one of the allowed values"),
        (message(role="tool", tool_call_id="c", content="1"), "messages[1].role: is not supported by this model"),
        (message(role="assistant", calls=["{}"]), "messages[1].tool_calls: is not supported by this model"),
    ],
    ("chat", "api"): [
        *((schema({"$ref": each}), OUTSIDE) for each in ("http://127.0.0.1:1/a", "file:///etc/hostname", "other.json")),
        *FORMATS,
    ],
    ("embeddings", "embed"): [
        ({"input": []}, "input: must be a list of length >= 1"),
        ({"input": [1, 2]}, "input[0]: must be a string, not an integer"),
        ({"input": [[1, 2]]}, "input[0]: must be a string, not a list"),
        ({"input": None}, "input: is required"),
        ({"encoding_format": "int8"}, "encoding_format: is not one of the allowed values"),
        ({"user": 5}, "user: must be a string, not an integer"),
        ({"dimensions": 3}, "dimensions: is not the length of this model's vectors, which is fixed"),
    ],
    ("embeddings", "vectors"): [
        ({"input": [1, "a"]}, "input: has token ids beside texts or lists"),
        ({"input": [[]]}, "input[0]: must be a list of length >= 1"),
        ({"input": [-1]}, "input[0]: must be an integer >= 0"),
        ({"input": [1.5]}, "input[0]: must be an integer or a string or a list, not a decimal number"),
        ({"input": []}, "input: must be a list of length >= 1"),
        ({"input": ["a"] * 2049}, "input: has more than 2048 elements"),
        ({"dimensions": 0}, "dimensions: must be an integer >= 1"),
        ({"dimensions": [2]}, "dimensions: must be an integer, not a list"),
    ],
}
"""By address and model: the changed fields, and what is wrong with which field."""
UNSUPPORTED: dict[tuple[str, str], dict[str, Any]] = {
    ("completions", "write"): {"best_of": 2, "logprobs": 1, "suffix": "x", "presence_penalty": 0.5, "messages": []}
    | {"max_completion_tokens": 9},
    ("completions", "tools"): {"tools": [tool()]},
    ("chat", "write"): {"tools": [{"type": "function"}], "logprobs": True, "prompt": "x", "ignore_eos": True}
    | {"min_tokens": 4, "reasoning_effort": "high", "functions": [{"name": "f"}], "top_logprobs": 2, "audio": {}}
    | {"moderation": {"model": "x"}, "web_search_options": {}},
    ("chat", "llm"): {"logit_bias": {"5": 1}, "adapter": "french", "lora_name": "x", "foo": 1},
    ("chat", "tools"): {"reasoning_effort": "high", "chat_template_kwargs": {"a": 1}},
    ("chat", "thinks"): {"tools": [tool()], "tool_choice": "required"},
    ("embeddings", "embed"): {"seed": 1},
    ("embeddings", "vectors"): {"embedding_request": "{}"},
}
"""By address and model: fields that it refuses, each in a request of its own."""


@pytest.mark.parametrize(("address", "model"), REFUSED | UNSUPPORTED)
async def test_a_wrong_field_is_named_and_never_reaches_the_model(api: Served, address: str, model: str) -> None:
    unsupported = UNSUPPORTED.get((address, model), {})
    rows = [({name: value}, f"{name}: is not supported by this model") for name, value in unsupported.items()]
    for body, problem in (*REFUSED.get((address, model), ()), *rows):
        answered = await api.client.post(ADDRESSES[address], json={"model": model} | BODIES[address] | body)
        param, _, text = problem.partition(": ")
        assert refusal(answered) == (400, "invalid_input", param), problem
        assert answered.json()["error"]["message"] == f"'{param}' {text}."
        assert api.engine.requests == [], problem


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"model": "write", "prompt": "a" "b"}', "invalid_json"),
        (b'{"model": "write", "prompt": nul}', "invalid_json"),
        (b'{"model": "write", "prompt": "a", "prompt": "b"}', "invalid_input"),
        (b"[]", "invalid_request"),
        (b'{"model": "write", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "invalid_json"),
    ],
)
async def test_a_malformed_body_is_400(api: Served, body: bytes, code: str) -> None:
    answer = await api.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert refusal(answer)[:2] == (400, code)


async def test_routing_errors_have_openais_format(api: Served) -> None:
    assert refusal(await api.client.get("/v1/completions"))[:2] == (405, "method_not_allowed")
    for path in ("chat/foo", "responses", "images/generations", "audio/translations", "files"):
        assert refusal(await api.client.post(f"/v1/{path}", json={}))[:2] == (404, "not_found")
    assert refusal(await api.client.post("/v1/completions", content=b"x"))[:2] == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("address", "model"),
    [*(("completions", each) for each in ("nobody", "embed", "other")), ("embeddings", "write"), ("chat", "llm:latin")],
)
async def test_a_model_that_does_not_serve_the_address_is_404(api: Served, address: str, model: str) -> None:
    answered = await api.client.post(ADDRESSES[address], json={"model": model} | BODIES[address])
    assert refusal(answered) == (404, "model_not_found", None)
    assert api.engine.requests == []


async def test_the_models_are_the_pipelines_with_openai_and_their_adapters(api: Served) -> None:
    listed = (await api.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    names = [model["id"] for model in listed["data"]]
    served = ["llm", "tools", "thinks"]
    llms = [each for name in served for each in (name, f"{name}:french")]
    assert names == ["write", "echo", "embed", *llms, "api", "vectors"]
    assert {(model["object"], model["owned_by"]) for model in listed["data"]} == {("model", "triton-gateway")}
    for model in listed["data"]:
        assert (await api.client.get(f"/v1/models/{model['id']}")).json() == model
    for name in ("other", "nobody"):
        assert refusal(await api.client.get(f"/v1/models/{name}")) == (404, "model_not_found", None)
    answer = await api.client.post("/v1/completions", json={"model": "nobody", "prompt": "a"})
    message = answer.json()["error"]["message"]
    assert message.startswith("There is no model with this id; valid here: ")
    assert set(message.partition("valid here: ")[2].split(", ")) == set(names)


TYPES = {4: "invalid_request_error", 5: "server_error"}
TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@pytest.mark.parametrize("kind", ROW_BY_ERROR, ids=lambda kind: kind.code)
def test_every_error_has_openais_format(kind: type[GatewayError]) -> None:
    response = openai_error_response(error_of(kind), "rid")
    error = json.loads(response.body)["error"]
    assert error["message"] == "It failed."
    assert error["type"] == TYPE_BY_STATUS.get(response.status_code, TYPES[response.status_code // 100])
    assert error["code"] == ("model_not_found" if kind is errors.UnknownPipeline else kind.code)
    assert response.headers["x-should-retry"] == str(kind.retryable).lower()
    assert response.headers.get("retry-after") == (str(kind.retry_after_s) if kind.retry_after_s else None)


def test_an_error_has_its_first_field_its_hint_and_at_most_4_kib() -> None:
    problems = [FieldProblem(f"field {index}", "x" * 2000) for index in range(MAX_PROBLEMS)]
    response = openai_error_response(errors.InvalidInput("y" * 9000, hint="z" * 9000, errors=problems), "rid")
    assert response.status_code == 400
    assert json.loads(response.body)["error"]["param"] == "field 0"
    assert len(response.body) <= 4096
    response = openai_error_response(errors.ModelError("It failed.", hint="Ask."), "rid")
    assert json.loads(response.body)["error"]["message"] == "It failed. Ask."
