"""Which of the lines that were read are worth showing."""

from collections.abc import Sequence

import numpy as np


def legible(texts: Sequence[str], scores: Sequence[float], least_score: float) -> np.ndarray:
    """The positions, in order, of texts that say something and are read with at least ``least_score`` (0 to 1)."""
    sure = [bool(text.strip()) and score >= least_score for text, score in zip(texts, scores, strict=True)]
    return np.flatnonzero(sure)
