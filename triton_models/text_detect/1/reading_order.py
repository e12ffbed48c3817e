"""Reading order: rows from top to bottom, each row from left to right."""

import numpy as np


def reading_order(boxes: np.ndarray) -> np.ndarray:
    """Sort boxes [n, 4, 2]. A box is in a row if its middle is within half the height of the row's first box."""
    if len(boxes) == 0:
        return boxes
    middles = boxes[:, :, 1].mean(axis=1)
    return boxes[np.lexsort((boxes[:, :, 0].min(axis=1), _rows(middles, np.ptp(boxes[:, :, 1], axis=1))))]


def _rows(middles: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """The row number of each box, [n], from the y of its middle and its height."""
    rows = np.zeros(len(middles), dtype=np.int64)
    row, limit = -1, -np.inf
    for box in np.argsort(middles, kind="stable"):
        if middles[box] > limit:
            row, limit = row + 1, middles[box] + heights[box] / 2
        rows[box] = row
    return rows
