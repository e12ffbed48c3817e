"""Limits the number of lines that are read in an image."""

import numpy as np


def largest(boxes: np.ndarray, count: int) -> np.ndarray:
    """Returns at most ``count`` of boxes [n, 4, 2]: those with the largest area, in their original order."""
    if len(boxes) <= count:
        return boxes
    areas = np.ptp(boxes, axis=1).prod(axis=1)
    return boxes[np.sort(np.argsort(-areas, kind="stable")[:count])]
