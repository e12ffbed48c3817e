"""Stop texts are found wherever the text is split into pieces."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.choices import StopMatcher


def cut(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    """Returns the text for the caller, and whether a stop text was found."""
    matcher = StopMatcher(stops)
    text = "".join(matcher.add(piece) for piece in pieces)
    return text + matcher.rest(), matcher.has_stopped


def cut_by_definition(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """A simple model: cuts at the first position where a stop text is complete; the longest stop text wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_text_that_cannot_become_a_stop_text_is_not_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.add(piece) for piece in ("one E", "N", "ter ", "E")] == ["one ", "", "ENter ", ""]
    assert matcher.rest() == "E"


def test_the_text_may_end_with_the_stop_text() -> None:
    matcher = StopMatcher(["bcd", "c"], keeps_stop=True)
    assert [matcher.add(piece) for piece in ("a", "b", "cd", "e")] == ["a", "", "bc", ""]


@given(
    st.lists(st.text("ab", max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_split_into_pieces_makes_no_difference(pieces: list[str], stops: list[str]) -> None:
    assert cut(pieces, stops) == cut_by_definition("".join(pieces), stops)
