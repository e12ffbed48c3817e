"""The size of a box's strip."""

import numpy as np

MAX_ASPECT = 64  # width over height; limits the network's memory, which grows with the longest strip
UPRIGHT_ASPECT = 1.5  # height over width; above it, a strip counts as a vertical line of text


def strip_size(box: np.ndarray) -> tuple[int, int]:
    """Width and height in pixels of a quadrilateral [4, 2]: the longer of its opposite sides, at least 1."""
    top, right, bottom, left = np.linalg.norm(np.roll(box, -1, axis=0) - box, axis=1)
    return max(1, int(max(top, bottom))), max(1, int(max(left, right)))


def is_upright(width: int, height: int) -> bool:
    return height >= width * UPRIGHT_ASPECT


def bounded_width(width: int, height: int) -> int:
    return min(width, height * MAX_ASPECT)
