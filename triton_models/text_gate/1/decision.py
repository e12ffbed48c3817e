"""Is there anything to read? A step of its own, so that the rule can change without touching detection."""

import numpy as np
from model_kit.outcomes import EarlyExit


def boxes_worth_reading(boxes: np.ndarray) -> np.ndarray:
    """The boxes [1, n, 4, 2] that recognition is to read: all of them.

    Raises:
        EarlyExit: there is none.
    """
    if boxes.shape[1] == 0:
        raise EarlyExit("no_text")
    return boxes
