"""The chunks of a stream add up to the text of the whole answer, wherever the model splits the bytes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.choices import Choice, TextOptions
from app.api.openai.text_answers import ChatAnswer
from app.core.inference import InferenceResponse
from app.pipelines.openai_mapping import TextForm
from tests.api.openai.conftest import WRITER
from tests.toolkit.models import pipeline, response, tensor

P = pipeline(
    WRITER,
    inputs={"prompt": {"tensor": "PROMPT", "kind": "text"}},
    outputs={"text": {"tensor": "TEXT", "kind": "text"}},
    openai={"completions": {}, "usage": {"prompt_tokens": "COUNT", "completion_tokens": "IDS"}},
)


def answer(stops: Sequence[str], *, stream: bool) -> ChatAnswer:
    assert P.openai is not None
    form = P.openai.completions
    assert isinstance(form, TextForm)
    options = TextOptions(stream=stream, include_usage=True, stops=stops)
    choice = Choice(P, form, P.request_of_json(b'{"prompt": "x"}'), options, {})
    return ChatAnswer([choice], "p", "rid", options)


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
