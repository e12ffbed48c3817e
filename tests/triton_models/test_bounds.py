"""The time for an image is limited by its number of lines and by the deadline."""

import numpy as np
import pytest


def boxes(*sides):
    """Returns squares with these sides, shape [n, 4, 2]."""
    return np.array([[[0, 0], [side, 0], [side, side], [0, side]] for side in sides], dtype=np.float32)


@pytest.fixture(scope="module")
def largest(load):
    return load("text_detect", "largest").largest


@pytest.fixture(scope="module")
def read_in_groups(load):
    return load("text_recognize", "groups").read_in_groups


def test_the_largest_boxes_are_kept_in_their_order(largest):
    assert largest(boxes(3, 1, 5, 2, 4), 3)[:, 2, 0].tolist() == [3, 5, 4]
    assert largest(boxes(3, 1), 2)[:, 2, 0].tolist() == [3, 1]
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
