"""The chat of a pipeline with `openai: {chat: ...}`, in the console, in a real Chromium against a real Triton."""

import json
from collections.abc import Callable

import httpx

from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually

Console = Callable[..., ConsolePage]


def open_chat(console: Console, pipeline: str) -> ConsolePage:
    page = console(pipeline)
    page.click(".tabs [role=tab]:nth-child(2)")
    page.wait_for(".compose")
    return page


def say(page: ConsolePage, text: str) -> None:
    page.fill("message", text)
    page.click("#send")


def test_a_chat_streams_its_answer_with_figures(
    console: Console, client: httpx.Client, axe: Callable[[], list[list[str]]]
) -> None:
    page = open_chat(console, "write")
    for name, value in (("max_tokens", "12"), ("temperature", "0")):
        control = page.one(f"#chat-{name}")
        control.clear()
        control.send_keys(value)
    say(page, "What is a list?")
    page.wait_for(".message[data-state=length] [data-figures]", "12 tokens")
    assert "first token after" in page.texts("[data-figures]")[0]
    say(page, "And a set?")
    page.wait_for(".message:nth-child(4)[data-state=length]")
    texts = [page.one(f".message:nth-child({n}) .text").get_property("textContent") for n in (1, 2, 3, 4)]
    messages = [{"role": ["user", "assistant"][n % 2], "content": text} for n, text in enumerate(texts)]
    body = {"model": "write", "messages": messages[:3], "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert texts[3] == answer["choices"][0]["message"]["content"]
    assert axe() == []


def test_stop_ends_the_answer_and_the_model(console: Console, gateway: GatewayProcess) -> None:
    labels = {"pipeline": "scripted_stream", "outcome": "cancelled"}
    before = gateway.metric("requests_total", **labels)
    page = open_chat(console, "scripted_stream")
    say(page, json.dumps({"outputs": 1000, "interval_s": 0.02, "texts": ["61"]}))
    page.wait_for(".message[data-role=assistant] .text", "aa")
    page.click("#stop")
    page.wait_for(".message[data-state=stopped] [data-figures]", "stopped")
    eventually(lambda: gateway.metric("requests_total", **labels) == before + 1)
    page.wait_for("#send")


def test_a_failed_answer_is_explained(console: Console) -> None:
    page = open_chat(console, "scripted_stream")
    say(page, json.dumps({"outputs": 0, "then": "error"}))
    page.wait_for(".message .problem a", "model_error")
