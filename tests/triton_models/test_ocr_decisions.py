"""The decisions between and after detection and recognition, without the networks."""

import numpy as np
import pytest


def boxes(count):
    return np.arange(count * 8, dtype=np.float32).reshape(1, count, 4, 2)


@pytest.fixture(scope="module")
def boxes_worth_reading(load):
    return load("text_gate", "decision").boxes_worth_reading


@pytest.fixture(scope="module")
def answers(load):
    return load("ocr_bls", "answers")


@pytest.fixture(scope="module")
def legible(load):
    return load("text_recognize", "legible").legible


@pytest.fixture(scope="module")
def early_exit(load):
    return load("text_gate", "decision").EarlyExit


def test_the_gate_passes_boxes_unchanged(boxes_worth_reading):
    assert (boxes_worth_reading(boxes(3)) == boxes(3)).all()


def test_the_gate_exits_early_without_boxes(boxes_worth_reading, early_exit):
    with pytest.raises(early_exit) as caught:
        boxes_worth_reading(boxes(0))
    assert str(caught.value) == "EARLY_EXIT[no_text]"


def test_the_script_exits_early_without_boxes(answers, early_exit):
    answers.require_text(boxes(1))
    with pytest.raises(early_exit) as caught:
        answers.require_text(boxes(0))
    assert caught.value.reason == "no_text"


def test_the_script_returns_the_recognized_lines(answers):
    texts, scores = np.array([[b"a"]], dtype=np.object_), np.array([[0.9]], dtype=np.float32)
    answer = answers.answer_of(boxes(2), boxes(1), texts, scores)
    assert list(answer) == ["BOXES", "TEXTS", "SCORES"]
    assert answer["BOXES"].shape == (1, 1, 4, 2)


def test_the_script_returns_only_boxes_if_none_is_legible(answers):
    empty = np.zeros((1, 0), dtype=np.float32)
    answer = answers.answer_of(boxes(2), boxes(0), empty.astype(np.object_), empty)
    assert list(answer) == ["BOXES"]
    assert answer["BOXES"].shape == (1, 2, 4, 2)


def test_lines_are_kept_by_score_and_content(legible):
    kept = legible(["sure", "unsure", "", " ", "limit"], [0.9, 0.49, 0.9, 0.9, 0.5], 0.5)
    assert kept.tolist() == [0, 4]


def test_no_lines_leave_none(legible):
    assert legible([], [], 0.5).shape == (0,)
