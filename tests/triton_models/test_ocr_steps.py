"""The steps of OCR without their networks: the canvas, the order and the number of boxes, strips, kept lines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def canvas(load):
    return load("text_detect", "canvas")


def test_a_large_image_is_scaled_down_to_the_budget(canvas):
    kept, scaled = canvas.placement_of(320, 640, 614_400), canvas.placement_of(3000, 4000, 614_400)
    assert (kept.drawn_height, kept.drawn_width) == (320, 640)
    assert scaled.drawn_height * scaled.drawn_width == pytest.approx(614_400, rel=0.01)
    assert scaled.drawn_width / scaled.drawn_height == pytest.approx(4 / 3, rel=0.01)


@given(height=st.integers(1, 32_000), width=st.integers(1, 32_000))
def test_any_image_fits_the_budget_and_the_longest_side(canvas, height, width):
    placement = canvas.placement_of(height, width, 614_400)
    longest = max(placement.drawn_height, placement.drawn_width)
    assert 1 <= longest <= canvas.MAX_SIDE_PX
    assert placement.drawn_height * placement.drawn_width <= max(614_400 * 1.02, longest)


@pytest.mark.parametrize("size", [(1, 1), (31, 33), (32, 32), (320, 640), (17, 500)])
def test_the_canvas_has_whole_cells_and_a_margin(canvas, size):
    drawn = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    painted = canvas.canvas_of(drawn)
    margin = canvas.MARGIN_PX
    assert painted.shape[0] % 32 == painted.shape[1] % 32 == 0
    assert all(margin <= painted.shape[axis] - margin - size[axis] < margin + 32 for axis in (0, 1))
    assert (painted[margin : margin + size[0], margin : margin + size[1]] == drawn).all()
    assert (painted[0, 0] == drawn[0, 0]).all()


def box(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def test_boxes_are_converted_to_pixels_of_the_image(canvas):
    placement = canvas.Placement(height=200, width=400, drawn_height=100, drawn_width=200)
    found = np.array([box(26, 36, 66, 56)], dtype=np.float32)
    inside = canvas.boxes_in_image(found, placement)
    assert inside.dtype == np.float32
    assert inside.tolist() == [box(20, 40, 100, 80)]
    placement = canvas.Placement(height=50, width=100, drawn_height=50, drawn_width=100)
    found = np.array([box(6, 20, 126, 40), box(20, 0, 90, 15), box(118, 20, 130, 40)], dtype=np.float32)
    assert canvas.boxes_in_image(found, placement).tolist() == [box(0, 4, 100, 24)], "clipped to the image"
    assert canvas.boxes_in_image(np.array([]), placement).shape == (0, 4, 2)


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


def squares(*sides):
    """Returns squares with these sides, shape [n, 4, 2]."""
    return np.array([[[0, 0], [side, 0], [side, side], [0, side]] for side in sides], dtype=np.float32)


@pytest.fixture(scope="module")
def largest(load):
    return load("text_detect", "largest").largest


@pytest.fixture(scope="module")
def read_in_groups(load):
    return load("text_recognize", "groups").read_in_groups


def test_the_largest_boxes_are_kept_in_their_order(largest):
    assert largest(squares(3, 1, 5, 2, 4), 3)[:, 2, 0].tolist() == [3, 5, 4]
    assert largest(squares(3, 1), 2)[:, 2, 0].tolist() == [3, 1]
    assert largest(np.zeros((0, 4, 2), dtype=np.float32), 2).shape == (0, 4, 2)


def strips(*widths):
    return [np.zeros((1, width, 3), dtype=np.uint8) for width in widths]


def test_strips_are_grouped_by_size_and_returned_in_order(read_in_groups):
    groups = []

    def read(group):
        groups.append([strip.shape[1] for strip in group])
        return [(str(strip.shape[1]), 1.0) for strip in group]

    widths = [9, 1, 8, 2, 7, 3, 6, 4]
    lines = read_in_groups(strips(*widths), read, lambda: None)
    assert [text for text, _ in lines] == [str(width) for width in widths]
    assert groups == [[1, 2, 3, 4, 6, 7], [8, 9]]


def test_reading_ends_at_the_first_group_after_the_deadline(read_in_groups):
    checks = iter([None, None, TimeoutError()])
    read = []

    def check():
        outcome = next(checks)
        if outcome is not None:
            raise outcome

    def read_group(group):
        read.append(len(group))
        return [("", 0.0)] * len(group)

    with pytest.raises(TimeoutError):
        read_in_groups(strips(*range(1, 301)), read_group, check)
    assert read == [6, 6]


def test_no_strips_are_no_lines(read_in_groups):
    assert read_in_groups([], lambda group: [], lambda: None) == []


@pytest.fixture(scope="module")
def shape(load):
    return load("text_recognize", "strip_shape")


def test_the_strip_is_as_large_as_the_longer_sides(shape):
    quad = np.array([[0, 0], [100, 0], [90, 20], [0, 30]], dtype=np.float32)
    assert shape.strip_size(quad) == (100, 30)


def test_a_rotated_box_is_measured_along_its_sides(shape):
    quad = np.array([[0, 0], [30, 40], [22, 46], [-8, 6]], dtype=np.float32)
    assert shape.strip_size(quad) == (50, 10)


def test_a_box_without_area_has_one_pixel(shape):
    assert shape.strip_size(np.zeros((4, 2), dtype=np.float32)) == (1, 1)


@pytest.mark.parametrize(("width", "height", "upright"), [(20, 100, True), (20, 30, True), (20, 29, False)])
def test_a_tall_strip_counts_as_upright_text(shape, width, height, upright):
    assert shape.is_upright(width, height) is upright


@pytest.mark.parametrize(("width", "height", "bounded"), [(640, 10, 640), (641, 10, 640), (30_000, 3, 192), (5, 9, 5)])
def test_the_width_of_a_long_strip_is_limited(shape, width, height, bounded):
    assert shape.bounded_width(width, height) == bounded


@pytest.fixture(scope="module")
def legible(load):
    return load("text_recognize", "legible").legible


def test_lines_are_kept_by_score_and_content(legible):
    kept = legible(["sure", "unsure", "", " ", "limit"], [0.9, 0.49, 0.9, 0.9, 0.5], 0.5)
    assert kept.tolist() == [0, 4]


def test_no_lines_leave_none(legible):
    assert legible([], [], 0.5).shape == (0,)
