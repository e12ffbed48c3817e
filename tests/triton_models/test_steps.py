"""Steps without their networks: canvas, boxes, strips and kept lines of OCR, and the segments of speech."""

import canvas
import numpy as np
import pytest
import strip_shape
from groups import read_in_groups
from hypothesis import given
from hypothesis import strategies as st
from largest import largest
from legible import legible
from reading_order import reading_order
from speech_segments import MAX_SEGMENTS, SpeechSegments


def boxes(*corners):
    """Returns boxes of shape [n, 4, 2] from (left, top, right, bottom)."""
    quads = [[[x0, y0], [x1, y0], [x1, y1], [x0, y1]] for x0, y0, x1, y1 in corners]
    return np.array(quads, dtype=np.float32).reshape(-1, 4, 2)


def test_a_large_image_is_scaled_down_to_the_budget():
    kept, scaled = canvas.placement_of(320, 640, 614_400), canvas.placement_of(3000, 4000, 614_400)
    assert (kept.drawn_height, kept.drawn_width) == (320, 640)
    assert scaled.drawn_height * scaled.drawn_width == pytest.approx(614_400, rel=0.01)
    assert scaled.drawn_width / scaled.drawn_height == pytest.approx(4 / 3, rel=0.01)


@given(height=st.integers(1, 32_000), width=st.integers(1, 32_000))
def test_any_image_fits_the_budget_and_the_longest_side(height, width):
    placement = canvas.placement_of(height, width, 614_400)
    longest = max(placement.drawn_height, placement.drawn_width)
    assert 1 <= longest <= canvas.MAX_SIDE_PX
    assert placement.drawn_height * placement.drawn_width <= max(614_400 * 1.02, longest)


@pytest.mark.parametrize("size", [(1, 1), (31, 33), (32, 32), (320, 640), (17, 500)])
def test_the_canvas_has_whole_cells_and_a_margin(size):
    drawn = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    painted = canvas.canvas_of(drawn)
    margin = canvas.MARGIN_PX
    assert painted.shape[0] % 32 == painted.shape[1] % 32 == 0
    assert all(margin <= painted.shape[axis] - margin - size[axis] < margin + 32 for axis in (0, 1))
    assert (painted[margin : margin + size[0], margin : margin + size[1]] == drawn).all()
    assert (painted[0, 0] == drawn[0, 0]).all()


def test_boxes_are_converted_to_pixels_of_the_image():
    placement = canvas.Placement(height=200, width=400, drawn_height=100, drawn_width=200)
    inside = canvas.boxes_in_image(boxes((26, 36, 66, 56)), placement)
    assert inside.dtype == np.float32
    assert inside.tolist() == boxes((20, 40, 100, 80)).tolist()
    placement = canvas.Placement(height=50, width=100, drawn_height=50, drawn_width=100)
    found = boxes((6, 20, 126, 40), (20, 0, 90, 15), (118, 20, 130, 40))
    clipped = boxes((0, 4, 100, 24)).tolist()
    assert canvas.boxes_in_image(found, placement).tolist() == clipped, "clipped to the image"
    assert canvas.boxes_in_image(np.array([]), placement).shape == (0, 4, 2)


def test_lines_are_read_from_top_to_bottom():
    lower, upper = (0, 100, 50, 120), (10, 10, 60, 30)
    assert reading_order(boxes(lower, upper)).tolist() == boxes(upper, lower).tolist()
    assert reading_order(boxes()).shape == (0, 4, 2)


def test_words_on_a_slope_are_several_rows():
    stairs = [(100 - 20 * step, 12 * step, 118 - 20 * step, 12 * step + 20) for step in range(5)]
    tops = reading_order(boxes(*stairs))[:, 0, 1]
    assert tops[0] < tops[-1]
    assert tops[-1] == 48


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=12, unique=True), st.randoms())
def test_the_order_does_not_depend_on_the_order_of_detection(places, random):
    corners = [(x, y, x + 30, y + 12) for x, y in places]
    shuffled = random.sample(corners, len(corners))
    ordered = reading_order(boxes(*corners))
    assert sorted(ordered.tolist()) == sorted(boxes(*corners).tolist())
    tops = [(box[0][1]) for box in ordered.tolist()]
    assert sorted(tops) == sorted(box[0][1] for box in reading_order(boxes(*shuffled)).tolist())


def test_the_largest_boxes_are_kept_in_their_order():
    squares = boxes(*((0, 0, side, side) for side in (3, 1, 5, 2, 4)))
    assert largest(squares, 3)[:, 2, 0].tolist() == [3, 5, 4]
    assert largest(squares[:2], 2)[:, 2, 0].tolist() == [3, 1]
    assert largest(boxes(), 2).shape == (0, 4, 2)


def strips(*widths):
    return [np.zeros((1, width, 3), dtype=np.uint8) for width in widths]


def test_strips_are_grouped_by_size_and_returned_in_order():
    groups = []

    def read(group):
        groups.append([strip.shape[1] for strip in group])
        return [(str(strip.shape[1]), 1.0) for strip in group]

    widths = [9, 1, 8, 2, 7, 3, 6, 4]
    lines = read_in_groups(strips(*widths), read, lambda: None)
    assert [text for text, _ in lines] == [str(width) for width in widths]
    assert groups == [[1, 2, 3, 4, 6, 7], [8, 9]]
    assert read_in_groups([], read, lambda: None) == []


def test_reading_ends_at_the_first_group_after_the_deadline():
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


@pytest.mark.parametrize(
    ("corners", "size"),
    [
        ([[0, 0], [100, 0], [90, 20], [0, 30]], (100, 30)),  # the longer sides
        ([[0, 0], [30, 40], [22, 46], [-8, 6]], (50, 10)),  # rotated
        ([[0, 0]] * 4, (1, 1)),
    ],
)
def test_a_strip_is_as_large_as_the_longer_sides_of_its_box(corners, size):
    assert strip_shape.strip_size(np.array(corners, dtype=np.float32)) == size


@pytest.mark.parametrize(("width", "height", "upright"), [(20, 100, True), (20, 30, True), (20, 29, False)])
def test_a_tall_strip_counts_as_upright_text(width, height, upright):
    assert strip_shape.is_upright(width, height) is upright


@pytest.mark.parametrize(("width", "height", "bounded"), [(640, 10, 640), (641, 10, 640), (30_000, 3, 192), (5, 9, 5)])
def test_the_width_of_a_long_strip_is_limited(width, height, bounded):
    assert strip_shape.bounded_width(width, height) == bounded


def test_lines_are_kept_by_score_and_content():
    kept = legible(["sure", "unsure", "", " ", "limit"], [0.9, 0.49, 0.9, 0.9, 0.5], 0.5)
    assert kept.tolist() == [0, 4]
    assert legible([], [], 0.5).shape == (0,)


@pytest.fixture
def segments():
    """A chunk is 32 ms."""
    return SpeechSegments()


def found(segments):
    return [(round(float(start), 3), round(float(end), 3)) for start, end in segments.as_array()]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1] * 100, []),
        ([0.1] * 10 + [0.9] * 10 + [0.1] * 10, [(0.29, 0.67)]),  # with a margin on both sides
        ([0.9] * 10, [(0.0, 0.32)]),
        ([0.9] * 7 + [0.1] * 10, []),  # too short
    ],
)
def test_speech_is_a_segment(segments, scores, expected):
    segments.add(scores)
    assert found(segments) == expected
    segments.end()
    assert segments.as_array().shape == (len(expected), 2)


def test_an_open_segment_ends_now(segments):
    segments.add([0.1] * 10 + [0.9] * 10)
    assert found(segments) == [(0.29, 0.64)]
    segments.add([0.9] * 10)
    assert found(segments) == [(0.29, 0.96)]
    segments.end()
    assert found(segments) == [(0.29, 0.96)]


@pytest.mark.parametrize(("drop", "count"), [([0.4] * 20, 1), ([0.1] * 3, 1), ([0.1] * 4, 2)])
def test_short_drops_do_not_end_a_segment(segments, drop, count):
    segments.add([0.9] * 10 + drop + [0.9] * 10)
    assert len(found(segments)) == count


def test_the_number_of_segments_is_bounded(segments):
    for _ in range(MAX_SEGMENTS + 5):
        segments.add([0.9] * 10 + [0.1] * 10)
    assert len(found(segments)) == MAX_SEGMENTS
    assert found(segments)[-1][1] == pytest.approx((20 * (MAX_SEGMENTS + 5) - 10) * 0.032 + 0.03, abs=0.01)
