"""The script's answers: without text, without legible text, and with text."""

from collections.abc import Mapping

import numpy as np
from model_kit.outcomes import EarlyExit


def require_text(boxes: np.ndarray) -> None:
    """Raises EarlyExit if detection found no boxes [1, n, 4, 2]."""
    if boxes.shape[1] == 0:
        raise EarlyExit("no_text")


def answer_of(boxes: np.ndarray, lines: np.ndarray, texts: np.ndarray, scores: np.ndarray) -> Mapping[str, np.ndarray]:
    """Returns the legible lines; without any, returns only the detected boxes and omits TEXTS and SCORES.

    Args:
        boxes: [1, n, 4, 2], as detected.
        lines: [1, m, 4, 2], those of the boxes that were read, with their texts and scores [1, m].
    """
    if texts.size == 0:
        return {"BOXES": boxes}
    return {"BOXES": lines, "TEXTS": texts, "SCORES": scores}
