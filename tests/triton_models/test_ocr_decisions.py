"""Which recognized lines are kept, without the networks."""

import pytest


@pytest.fixture(scope="module")
def legible(load):
    return load("text_recognize", "legible").legible


def test_lines_are_kept_by_score_and_content(legible):
    kept = legible(["sure", "unsure", "", " ", "limit"], [0.9, 0.49, 0.9, 0.9, 0.5], 0.5)
    assert kept.tolist() == [0, 4]


def test_no_lines_leave_none(legible):
    assert legible([], [], 0.5).shape == (0,)
