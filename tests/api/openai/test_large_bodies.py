"""Memory used for large bodies, valid and invalid."""

import asyncio
import json
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from app.api.openai.embeddings import EmbeddingsRoute, batch_of
from app.api.openai.requests import Door, NamedRequest, read_members
from app.api.openai.text_routes import ChatRoute, CompletionsRoute
from app.core.errors import InvalidInput
from app.pipelines.pipeline import Pipeline
from tests.api.openai.conftest import (
    ASKED,
    EMBEDDER,
    WRITER,
    Api,
    Gateways,
    ask,
    message_of,
    steps_of,
)
from tests.api.openai.test_choices import bounded
from tests.toolkit.models import pipeline

ANYTHING: Any = None
SIZE = 4 * 1024 * 1024
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WRITE = pipeline(
    WRITER,
    inputs={"prompt": {"tensor": "PROMPT", "kind": "text"}},
    outputs={"text": {"tensor": "TEXT", "kind": "text"}},
    openai={"completions": {}, "chat": {"template_text": CHAT}},
)
EMBED = pipeline(
    EMBEDDER,
    inputs={"text": {"tensor": "TEXT", "kind": "text"}},
    outputs={"embedding": {"tensor": "VECTOR"}},
    openai={"embeddings": {}},
)


def complete(body: bytes) -> Any:
    return text_request(CompletionsRoute(ANYTHING, ANYTHING), body)


def chat(body: bytes) -> Any:
    return text_request(ChatRoute(ANYTHING, ANYTHING, None), body)


def text_request(route: CompletionsRoute | ChatRoute, body: bytes) -> Any:
    named = named_request(route, WRITE, body)
    return route.requests_of(named, route.take_options(named.members, named.form))[0]


def embed(body: bytes) -> Any:
    return batch_of(named_request(EmbeddingsRoute(ANYTHING, ANYTHING), EMBED, body)).requests[0]


def named_request(route: Door[Any], pipeline: Pipeline, body: bytes) -> NamedRequest[Any]:
    form, members = route.form_of(pipeline), read_members(body)
    return NamedRequest(pipeline, form, "p", memoryview(body), members, {})


def cost_of(read: Callable[[bytes], Any], body: bytes) -> float:
    """Returns the peak memory of reading the body, as a multiple of the body's size."""
    tracemalloc.start()
    try:
        read(body)
    except InvalidInput:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / len(body)


def filled(start: str, element: str, end: str) -> bytes:
    return (start + element * (SIZE // len(element)) + end).encode()


MESSAGE = '{"role":"user","content":""}'
PART = '{"type":"text","text":""}'
MEMBERS = json.dumps({f"field {index}": 1 for index in range(200_000)}).encode()
REJECTED = {
    "members": (complete, MEMBERS),
    "stop": (complete, filled('{"stop": [', '"",', '""]}')),
    "prompts": (complete, filled('{"prompt": [', '"",', '""]}')),
    "a neutral field": (complete, filled('{"prompt": "a", "logit_bias": {', '"1":1,', '"2":1}}')),
    "messages": (chat, filled('{"messages": [', f"{MESSAGE},", f"{MESSAGE}]}}")),
    "parts": (chat, filled('{"messages": [{"role":"user","content":[', f"{PART},", f"{PART}]}}]}}")),
    "inputs": (embed, filled('{"input": [', '"",', '""]}')),
}
ACCEPTED = {
    "one prompt": (complete, filled('{"prompt": "', "x", '"}')),
    "one message": (chat, filled('{"messages": [{"role":"user","content":"', "x", '"}]}')),
    "one input": (embed, filled('{"input": "', "x", '"}')),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_rejected_body_uses_less_than_4_times_its_size(name: str) -> None:
    assert cost_of(*REJECTED[name]) < 4


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_long_text_uses_less_than_6_times_its_size(name: str) -> None:
    assert cost_of(*ACCEPTED[name]) < 6


def test_a_long_text_reaches_the_model_unchanged() -> None:
    text = "word " * 100_000
    assert complete(json.dumps({"prompt": text}).encode()).inputs[0].array[0].decode() == text
    messages = [{"role": "user", "content": text}]
    assert chat(json.dumps({"messages": messages}).encode()).inputs[0].array[0].decode() == f"user: {text}\n"
    assert embed(json.dumps({"input": [text]}).encode()).inputs[0].array[0, 0].decode() == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "write", "prompt": "Hi", "seed": 1, "stream": True}),
        ("/v1/completions", {"model": "write", "prompt": "Hi", "seed": 1}),
        ("/v1/chat/completions", {"model": "write", "messages": [{"role": "user", "content": "Hi"}], "stream": True}),
        ("/v1/embeddings", {"model": "embed", "input": ["Hi"]}),
    ],
)
async def test_the_body_is_freed_before_the_model_answers(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    bodies = [Held(json.dumps(body).encode())]
    held = weakref.ref(bodies[0])

    async def read(*_: Any) -> memoryview:
        return memoryview(bodies.pop())

    monkeypatch.setattr("app.api.openai.requests.read_json_of_any", read)
    api.engine.answers = [0.5]
    request = asyncio.create_task(api.client.post(path, json=body))
    while not api.engine.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert held() is None
    assert not request.done()
    request.cancel()
    await asyncio.wait([request])


class Held(bytearray):
    """A bytearray that allows weak references."""


def test_2048_texts_are_accepted_and_more_are_not() -> None:
    request = embed(json.dumps({"input": ["a,[{"] * 2048}).encode())
    assert request.inputs[0].shape == (2048, 1)
    with pytest.raises(InvalidInput, match="has more than 2048 elements"):
        embed(json.dumps({"input": ["a"] * 3000}).encode())


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=pytest.mark.full)])
async def test_large_arguments_of_a_call(gateways: Gateways, megabytes: int) -> None:
    llama = await gateways.of()
    function = {"name": "weather", "arguments": json.dumps({"city": "x" * megabytes * 1_000_000})}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    llama.engine.answers = steps_of("vllm", "Hello")
    with bounded(f"{megabytes} MB of arguments", seconds=5, mebibytes=16 * megabytes + 16):
        answered = await ask(llama, messages=[*ASKED, call])
    assert message_of(answered)["content"] == "Hello"
