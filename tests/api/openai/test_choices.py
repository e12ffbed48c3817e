"""One choice of an answer: its chunks, its stop texts, its calls; and the memory and time that large bodies need."""

import asyncio
import json
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.chat_request import ToolUse
from app.api.openai.choices import (
    MAX_CHECKED_CHARACTERS,
    ChatChoice,
    StopMatcher,
    TextAnswer,
    TextOptions,
    completion_logprobs,
)
from app.api.openai.embeddings import EmbeddingsRoute, batch_of
from app.api.openai.requests import Door, NamedRequest, read_members
from app.api.openai.text_routes import ChatRoute, CompletionsRoute
from app.core.errors import InvalidInput, ToolCallMissing
from app.core.inference import InferenceResponse
from app.llm.tool_calls import parser_of
from app.pipelines.pipeline import Pipeline
from tests.api.openai.conftest import ASKED, EMBEDDER, WRITER, Gateways, ask, message_of, steps_of
from tests.toolkit.gateway import Served
from tests.toolkit.models import pipeline, response, tensor
from tests.toolkit.work import grows_with

MIB = 1024 * 1024
ANYTHING: Any = None
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WRITE = pipeline(
    WRITER,
    inputs={"prompt": {"tensor": "PROMPT", "kind": "text"}},
    outputs={"text": {"tensor": "TEXT", "kind": "text"}},
    openai={
        "completions": {},
        "chat": {"template_text": CHAT},
        "usage": {"prompt_tokens": "COUNT", "completion_tokens": "IDS"},
    },
)
EMBED = pipeline(
    EMBEDDER,
    inputs={"text": {"tensor": "TEXT", "kind": "text"}},
    outputs={"embedding": {"tensor": "VECTOR"}},
    openai={"embeddings": {}},
)


def choice_of(options: TextOptions) -> ChatChoice:
    return ChatChoice(WRITE, WRITE.openai.completions, WRITE.request_of_json(b'{"prompt": "x"}'), options, {})


def answer(stops: Sequence[str], *, stream: bool) -> TextAnswer:
    options = TextOptions(stream=stream, include_usage=True, stops=stops)
    return TextAnswer([choice_of(options)], "p", "rid", options)


def responses_of(pieces: Sequence[bytes]) -> list[InferenceResponse]:
    last = len(pieces) - 1
    return [
        response(tensor("TEXT", "BYTES", [piece]), tensor("IDS", "INT32", [1]), is_final=index == last)
        for index, piece in enumerate(pieces)
    ]


def cut(text: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    st.text("a\u00e4\U0001f600.", max_size=12),
    st.lists(st.integers(0, 60), max_size=6),
    st.lists(st.text("a\u00e4.", min_size=1, max_size=3), max_size=3),
)
def test_chunks_add_up_to_the_whole_answer(text: str, places: list[int], stops: list[str]) -> None:
    pieces = responses_of(cut(text.encode(), places))
    streamed, joined = answer(stops, stream=True), answer(stops, stream=False)
    chunks = []
    for piece in pieces:
        chunks.append(streamed.add(piece))
        joined.add(piece)
        if streamed.has_enough:
            break
    chunks += streamed.finish().outputs
    (whole,) = joined.finish().outputs
    deltas = [choice["delta"] for chunk in chunks if chunk for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert chunks[-1] is not None
    assert chunks[-1].get("usage") == whole.get("usage")
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert streamed.has_enough == bool(ends)
    if not ends:
        assert whole["choices"][0]["message"]["content"] == text


def test_tokens_after_a_stop_text_are_counted() -> None:
    """The other choices of a request go on, and so does the model."""
    whole = answer(["b"], stream=False)
    for piece in responses_of([b"a", b"b", b"c"]):
        whole.add(piece)
    assert whole.tokens.completion == 3


def stopped(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    """Returns the text for the caller, and whether a stop text was found."""
    matcher = StopMatcher(stops)
    text = "".join(matcher.add(piece) for piece in pieces)
    return text + matcher.held, matcher.has_stopped


def stopped_by_definition(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """A simple model: cuts at the first position where a stop text is complete; the longest stop text wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_text_that_cannot_become_a_stop_text_is_not_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.add(piece) for piece in ("one E", "N", "ter ", "E")] == ["one ", "", "ENter ", ""]
    assert matcher.held == "E"


@given(
    st.lists(st.text("ab", max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_split_into_pieces_makes_no_difference(pieces: list[str], stops: list[str]) -> None:
    assert stopped(pieces, stops) == stopped_by_definition("".join(pieces), stops)


@contextmanager
def bounded(name: str, *, seconds: float, mebibytes: float) -> Iterator[None]:
    """Prints the time and the growth of the process's memory (``pytest -s``)."""
    process = psutil.Process()
    before, began = process.memory_info().rss, time.process_time()
    yield
    took, growth = time.process_time() - began, (process.memory_info().rss - before) / MIB
    sys.stdout.write(f"\n| {name} | {took:.2f} s | {growth:.1f} MiB |\n")
    assert took < seconds
    assert growth < mebibytes


@pytest.mark.parametrize("mebibytes", [2, pytest.param(64, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize(
    "start",
    ['<tool_call>\n{"name": "weather", "arguments": {"city": "', "<tool_call>\n", "<tool_call>\n{"],
    ids=["arguments", "nothing", "object"],
)
def test_a_call_that_never_ends_keeps_little(start: str, mebibytes: int, is_required: bool) -> None:
    options = TextOptions(stream=True, tools=ToolUse(is_required=is_required))
    options.parser = lambda: parser_of("hermes", {"weather": {}}, None, "")
    choice = choice_of(options)
    choice.add(response(tensor("TEXT", "BYTES", [start.encode()])))
    more = response(tensor("TEXT", "BYTES", [b"x" * 1024]))
    name = f"{mebibytes} MiB of a call, required: {is_required}, after {start[-12:]!r}"
    with bounded(name, seconds=2 * mebibytes + 5, mebibytes=16):
        for _ in range(mebibytes * MIB // 1024):
            choice.add(more)
    if is_required and "city" in start:
        assert mebibytes * MIB > MAX_CHECKED_CHARACTERS
        with pytest.raises(ToolCallMissing, match="too large to be checked"):
            choice.finish()


class Token(str):
    """A text whose length is asked for with a call that counts."""

    __slots__ = ()

    def __len__(self) -> int:
        return super().__len__()


def test_the_work_for_log_probabilities_grows_with_the_tokens_only() -> None:
    def work(count: int) -> Callable[[], object]:
        return lambda: completion_logprobs([[(Token("a"), -1.0)]] * count, 7)

    assert completion_logprobs([[(each, -1.0)] for each in ("ab", "c", "")], 7)["text_offset"] == [7, 9, 10]
    assert completion_logprobs([], 7) == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert grows_with(work, 1000)


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
    return (start + element * (4 * MIB // len(element)) + end).encode()


MESSAGE = '{"role":"user","content":""}'
PART = '{"type":"text","text":""}'
MEMBERS = json.dumps({f"field {index}": 1 for index in range(200_000)}).encode()
COSTS: dict[str, tuple[Callable[[bytes], Any], bytes, int]] = {
    "members": (complete, MEMBERS, 4),
    "stop": (complete, filled('{"stop": [', '"",', '""]}'), 4),
    "prompts": (complete, filled('{"prompt": [', '"",', '""]}'), 4),
    "a neutral field": (complete, filled('{"prompt": "a", "logit_bias": {', '"1":1,', '"2":1}}'), 4),
    "messages": (chat, filled('{"messages": [', f"{MESSAGE},", f"{MESSAGE}]}}"), 4),
    "parts": (chat, filled('{"messages": [{"role":"user","content":[', f"{PART},", f"{PART}]}}]}}"), 4),
    "inputs": (embed, filled('{"input": [', '"",', '""]}'), 4),
    # accepted: a long text
    "one prompt": (complete, filled('{"prompt": "', "x", '"}'), 6),
    "one message": (chat, filled('{"messages": [{"role":"user","content":"', "x", '"}]}'), 6),
    "one input": (embed, filled('{"input": "', "x", '"}'), 6),
}
"""How a body is read, and its limit of memory, as a multiple of its size."""


@pytest.mark.parametrize("name", COSTS)
def test_a_body_uses_a_small_multiple_of_its_size(name: str) -> None:
    read, body, most = COSTS[name]
    assert cost_of(read, body) < most


def test_long_and_many_texts_reach_the_model_unchanged() -> None:
    text = "word " * 100_000
    assert complete(json.dumps({"prompt": text}).encode()).inputs[0].array[0].decode() == text
    messages = [{"role": "user", "content": text}]
    assert chat(json.dumps({"messages": messages}).encode()).inputs[0].array[0].decode() == f"user: {text}\n"
    assert embed(json.dumps({"input": [text]}).encode()).inputs[0].array[0, 0].decode() == text
    assert embed(json.dumps({"input": ["a,[{"] * 2048}).encode()).inputs[0].shape == (2048, 1)


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
    api: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
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


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=pytest.mark.full)])
async def test_large_arguments_of_a_call(gateways: Gateways, megabytes: int) -> None:
    llama = await gateways.of()
    function = {"name": "weather", "arguments": json.dumps({"city": "x" * megabytes * 1_000_000})}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    llama.engine.answers = steps_of("vllm", "Hello")
    with bounded(f"{megabytes} MB of arguments", seconds=5, mebibytes=16 * megabytes + 16):
        answered = await ask(llama, messages=[*ASKED, call])
    assert message_of(answered)["content"] == "Hello"
