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
