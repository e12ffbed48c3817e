"""Decides whether an image has text. A separate step, so that the rule can change without the detection."""

import numpy as np
from model_kit.outcomes import EarlyExit


def boxes_worth_reading(boxes: np.ndarray) -> np.ndarray:
    """Returns the boxes [1, n, 4, 2] for recognition: all of them.

    Raises:
        EarlyExit: If there are no boxes.
    """
    if boxes.shape[1] == 0:
        raise EarlyExit("no_text")
    return boxes
