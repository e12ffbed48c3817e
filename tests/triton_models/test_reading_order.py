import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def reading_order(load):
    return load("text_detect", "reading_order").reading_order


def boxes(*corners):
    """Returns boxes of shape [n, 4, 2] from (left, top, right, bottom)."""
    quads = [[[x0, y0], [x1, y0], [x1, y1], [x0, y1]] for x0, y0, x1, y1 in corners]
    return np.array(quads, dtype=np.float32).reshape(-1, 4, 2)


def test_lines_are_read_from_top_to_bottom(reading_order):
    lower, upper = (0, 100, 50, 120), (10, 10, 60, 30)
    assert reading_order(boxes(lower, upper)).tolist() == boxes(upper, lower).tolist()


def test_words_of_an_uneven_row_are_read_left_to_right(reading_order):
    left, middle, right = (0, 14, 50, 40), (60, 10, 110, 36), (120, 18, 170, 44)
    below = (0, 60, 50, 86)
    assert reading_order(boxes(below, right, middle, left)).tolist() == boxes(left, middle, right, below).tolist()


def test_words_on_a_slope_are_several_rows(reading_order):
    stairs = [(100 - 20 * step, 12 * step, 118 - 20 * step, 12 * step + 20) for step in range(5)]
    tops = reading_order(boxes(*stairs))[:, 0, 1]
    assert tops[0] < tops[-1]
    assert tops[-1] == 48


def test_no_boxes_keep_their_shape(reading_order):
    assert reading_order(np.zeros((0, 4, 2), dtype=np.float32)).shape == (0, 4, 2)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=12, unique=True), st.randoms())
def test_the_order_does_not_depend_on_the_order_of_detection(reading_order, places, random):
    corners = [(x, y, x + 30, y + 12) for x, y in places]
    shuffled = random.sample(corners, len(corners))
    ordered = reading_order(boxes(*corners))
    assert sorted(ordered.tolist()) == sorted(boxes(*corners).tolist())
    tops = [(box[0][1]) for box in ordered.tolist()]
    assert sorted(tops) == sorted(box[0][1] for box in reading_order(boxes(*shuffled)).tolist())
