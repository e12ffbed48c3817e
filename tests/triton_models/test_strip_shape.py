import numpy as np
import pytest


@pytest.fixture(scope="module")
def shape(load):
    return load("text_recognize", "strip_shape")


def test_the_strip_is_as_large_as_the_longer_sides(shape):
    box = np.array([[0, 0], [100, 0], [90, 20], [0, 30]], dtype=np.float32)
    assert shape.strip_size(box) == (100, 30)


def test_a_rotated_box_is_measured_along_its_sides(shape):
    box = np.array([[0, 0], [30, 40], [22, 46], [-8, 6]], dtype=np.float32)
    assert shape.strip_size(box) == (50, 10)


def test_a_box_without_area_has_one_pixel(shape):
    assert shape.strip_size(np.zeros((4, 2), dtype=np.float32)) == (1, 1)


@pytest.mark.parametrize(("width", "height", "upright"), [(20, 100, True), (20, 30, True), (20, 29, False)])
def test_a_tall_strip_counts_as_upright_text(shape, width, height, upright):
    assert shape.is_upright(width, height) is upright


@pytest.mark.parametrize(("width", "height", "bounded"), [(640, 10, 640), (641, 10, 640), (30_000, 3, 192), (5, 9, 5)])
def test_the_width_of_a_long_strip_is_limited(shape, width, height, bounded):
    assert shape.bounded_width(width, height) == bounded
