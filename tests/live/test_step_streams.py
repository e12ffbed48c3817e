"""Streams of steps on the real Triton: guards before a language model, in every dialect, and callers that leave."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.toolkit.connections import Connection, post
from tests.toolkit.events import read_stream
from tests.toolkit.processes import GatewayProcess, linked_models, live_gateway, live_triton
from tests.toolkit.waiting import eventually

GUARDED: dict[str, Any] = {
    "inputs": {"prompt": {"tensor": "PROMPT", "kind": "text"}},
    "steps": {
        "tokens": {"model": "text_tokenize", "inputs": {"PROMPT": "PROMPT"}},
        "guard": {"model": "scripted", "inputs": {"SCRIPT": "PROMPT"}, "after": ["tokens"]},
        "unsafe": {"when": {"empty": "guard.NUMBERS"}, "exit": "unsafe"},
        "generate": {"model": "scripted_stream", "inputs": {"SCRIPT": "guard.TEXT"}},
        "unsafe_text": {"when": {"equals": ["generate.TEXT", "bad "]}, "exit": "unsafe"},
    },
    "outputs": {
        "text": {"tensor": "generate.TEXT", "kind": "text", "join": "concatenate"},
        "ids": {"tensor": "generate.TOKEN_ID", "join": "list"},
        "numbers": {"tensor": "guard.NUMBERS", "join": "last"},
    },
    "stream": True,
    "openai": {
        "completions": {"prompt": "prompt", "text": "text"},
        "chat": {"prompt": "prompt", "text": "text", "template_text": "{{ messages[-1].content }}"},
        "exits": {"unsafe": "content_filter"},
        "usage": {"prompt_tokens": "tokens.TOKEN_IDS", "completion_tokens": "generate.TOKEN_ID"},
    },
}
BEHIND: dict[str, Any] = {
    "inputs": {"prompt": {"tensor": "PROMPT", "kind": "text"}, "last": {"tensor": "LAST", "kind": "text"}},
    "steps": {
        "generate": {"model": "scripted_stream", "inputs": {"SCRIPT": "PROMPT"}},
        "answer": {"model": "scripted", "inputs": {"SCRIPT": "generate.TEXT"}, "optional": True},
        "last": {"model": "scripted", "inputs": {"SCRIPT": "LAST"}, "after": ["generate"]},
    },
    "outputs": {
        "text": {"tensor": "generate.TEXT", "kind": "text", "join": "list"},
        "answer": {"tensor": "answer.TEXT", "kind": "text", "join": "list"},
        "last": {"tensor": "last.TEXT", "kind": "text"},
    },
    "stream": True,
}
MAYBE: dict[str, Any] = {
    "inputs": {"prompt": {"tensor": "PROMPT", "kind": "text"}},
    "parameters": {"mode": {"type": "string"}},
    "steps": {"slow": {"model": "scripted", "when": {"equals": ["mode", "slow"]}, "inputs": {"SCRIPT": "PROMPT"}}},
    "outputs": {"text": {"tensor": "slow.TEXT", "kind": "text"}},
}
own_triton = live_triton(lambda folder: linked_models(folder, ("scripted", "scripted_stream", "text_tokenize")))
own_gateway = live_gateway({"guarded": GUARDED, "behind": BEHIND, "maybe": MAYBE}, "own_triton", drain_s="1")


def prompt(*texts: str, numbers: tuple[float, ...] = (1, 2), **script: Any) -> str:
    """The guard reads the numbers, and gives the rest to the generator."""
    generated = {"outputs": len(texts), "texts": [each.encode().hex() for each in texts], **script}
    return json.dumps({"numbers": numbers, "text": json.dumps(generated)})


@pytest.fixture(scope="module")
def client(own_gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_gateway.url, timeout=30) as found:
        yield found


@pytest.fixture(scope="module")
def openai(own_gateway: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{own_gateway.url}/v1", api_key="none", max_retries=0) as found:
        yield found


CASES = [  # the prompt, the text, the finish reason, the tokens of the text
    (prompt("a ", "b "), "a b ", "stop", 2),
    (prompt("a ", "b ", numbers=()), "", "content_filter", 0),
    (prompt("a ", "bad ", "c "), "a bad ", "content_filter", 2),
    (prompt(), "", "stop", 0),
]


@pytest.mark.parametrize(("text", "written", "reason", "tokens"), CASES, ids=["safe", "prompt", "text", "nothing"])
def test_openais_client_sees_a_guard_as_content_filter(
    openai: OpenAI, text: str, written: str, reason: str, tokens: int
) -> None:
    whole = openai.completions.create(model="guarded", prompt=text)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (written, reason)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens > 0, whole.usage.completion_tokens) == (True, tokens)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(openai.completions.create(model="guarded", prompt=text, **options))
    choices = [each.choices[0] for each in chunks if each.choices]
    assert "".join(each.text for each in choices) == written
    assert choices[-1].finish_reason == reason
    assert chunks[-1].usage == whole.usage
    chat = openai.chat.completions.create(model="guarded", messages=[{"role": "user", "content": text}])
    assert (chat.choices[0].message.content or "", chat.choices[0].finish_reason) == (written, reason)
    parts = list(
        openai.chat.completions.create(model="guarded", messages=[{"role": "user", "content": text}], stream=True)
    )
    assert "".join(each.choices[0].delta.content or "" for each in parts) == written
    assert parts[-1].choices[0].finish_reason == reason


def test_a_stream_and_a_whole_answer_end_early_alike(client: httpx.Client) -> None:
    for text, written, reason, _ in CASES:
        early_exit = "unsafe" if reason == "content_filter" else None
        whole = client.post("/v1/pipelines/guarded", json={"prompt": text})
        assert whole.status_code == 200, whole.text
        assert (whole.json()["text"], whole.json()["early_exit"]) == (written, early_exit)
        assert whole.headers.get("x-early-exit") == early_exit
        events = read_stream(client, "guarded", {"prompt": text})
        assert "".join(each.data["text"] or "" for each in events[:-1]) == written
        assert events[-1].data["early_exit"] == early_exit


def test_a_failure_behind_a_stream_ends_it_with_an_error(client: httpx.Client) -> None:
    body = {"prompt": json.dumps({"texts": [b"{}".hex()]}), "last": json.dumps({"raise": "no luck"})}
    whole = client.post("/v1/pipelines/behind", json=body)
    assert (whole.status_code, whole.json()["code"]) == (502, "model_error")
    *outputs, error = read_stream(client, "behind", body)
    assert [each.data["answer"] for each in outputs] == ["hello"] * 3
    assert error.data["detail"] == whole.json()["detail"] == "Step 'last': Model 'scripted' raised an exception."


def test_an_optional_step_behind_a_stream_is_skipped_where_it_fails(client: httpx.Client) -> None:
    texts = ["{}", '{"raise": "no luck"}', '{"text": "b"}']
    body = {"prompt": json.dumps({"texts": [each.encode().hex() for each in texts]}), "last": "{}"}
    *outputs, done = read_stream(client, "behind", body)
    answers = [(each.data["answer"], each.data["last"], each.data["skipped"]) for each in outputs]
    assert answers == [("hello", "", []), (None, "", ["answer"]), ("b", "", []), (None, "hello", [])]
    assert done.data["reason"] == "complete"
    whole = client.post("/v1/pipelines/behind", json=body).json()
    assert whole == {"text": texts, "answer": ["hello", None, "b"], "last": "hello", "skipped": ["answer"]}


def test_an_answer_may_have_no_output_at_all(client: httpx.Client) -> None:
    for mode, text in (("fast", None), ("slow", "hello")):
        answer = client.post("/v1/pipelines/maybe", json={"prompt": "{}", "mode": mode})
        assert (answer.status_code, answer.json()) == (200, {"text": text})


async def test_callers_that_leave_at_any_time_leave_nothing_behind(own_gateway: GatewayProcess) -> None:
    """While the guard runs, before the first event, between events, while a step behind the stream runs."""
    slow_guard = json.dumps({"sleep_s": 1, "text": "{}"})
    bodies = [
        ("guarded", {"prompt": slow_guard}, b""),
        ("guarded", {"prompt": prompt("a ", interval_s=3)}, b""),
        ("guarded", {"prompt": prompt("a ", outputs=500, interval_s=0.02)}, b"id: 3\n"),
        ("behind", {"prompt": json.dumps({"texts": [b'{"sleep_s": 0.4}'.hex()]}), "last": "{}"}, b"id: 1\n"),
    ]
    connections = []
    for name, body, until in bodies * 3:
        connection = await Connection.to(own_gateway)
        connection.writer.write(post(f"/v1/pipelines/{name}/stream", body))
        connections.append((connection, until))
    for connection, until in connections:
        if until:
            await connection.reader.readuntil(until)
    await asyncio.sleep(0.2)
    for connection, _ in connections:
        connection.writer.transport.abort()
    await asyncio.to_thread(eventually, lambda: own_gateway.metric("requests_running") == 0)
    await asyncio.to_thread(eventually, lambda: own_gateway.metric("shared_memory_bytes", state="used") == 0)
    async with httpx.AsyncClient(base_url=own_gateway.url, timeout=20) as client:
        assert (await client.post("/v1/pipelines/guarded", json={"prompt": prompt("a ")})).json()["text"] == "a "
    assert "Traceback" not in own_gateway.log
