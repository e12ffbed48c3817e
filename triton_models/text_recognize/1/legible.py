"""Selects legible lines."""

from collections.abc import Sequence

import numpy as np


def legible(texts: Sequence[str], scores: Sequence[float], least_score: float) -> np.ndarray:
    """Returns the indexes of texts that are not blank and have at least ``least_score`` (0 to 1)."""
    sure = [bool(text.strip()) and score >= least_score for text, score in zip(texts, scores, strict=True)]
    return np.flatnonzero(sure)
