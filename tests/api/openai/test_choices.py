"""One choice of an answer: its chunks, its stop texts, its calls, and its log probabilities."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.chat_request import ToolUse
from app.api.openai.choices import MAX_CHECKED_CHARACTERS, ChatChoice, StopMatcher, TextOptions, completion_logprobs
from app.api.openai.text_routes import TextAnswer
from app.core.errors import ToolCallMissing
from app.core.inference import InferenceResponse
from app.llm.tool_calls import parser_of
from tests.api.openai.conftest import WRITER
from tests.toolkit.models import pipeline, response, tensor
from tests.toolkit.work import grows_with

MIB = 1024 * 1024
P = pipeline(
    WRITER,
    inputs={"prompt": {"tensor": "PROMPT", "kind": "text"}},
    outputs={"text": {"tensor": "TEXT", "kind": "text"}},
    openai={"completions": {}, "usage": {"prompt_tokens": "COUNT", "completion_tokens": "IDS"}},
)


def choice_of(options: TextOptions) -> ChatChoice:
    assert P.openai is not None
    assert P.openai.completions is not None
    return ChatChoice(P, P.openai.completions, P.request_of_json(b'{"prompt": "x"}'), options, {})


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
    assert whole.tokens is not None
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


def test_the_text_may_end_with_the_stop_text() -> None:
    matcher = StopMatcher(["bcd", "c"], keeps_stop=True)
    assert [matcher.add(piece) for piece in ("a", "b", "cd", "e")] == ["a", "", "bc", ""]


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
