"""The most that is read of an image."""

import numpy as np


def largest(boxes: np.ndarray, count: int) -> np.ndarray:
    """At most ``count`` of boxes [n, 4, 2]: those of the largest area, in the order in which they came."""
    if len(boxes) <= count:
        return boxes
    areas = np.ptp(boxes, axis=1).prod(axis=1)
    return boxes[np.sort(np.argsort(-areas, kind="stable")[:count])]
