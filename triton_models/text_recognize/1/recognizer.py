"""The recognition network of rapidocr-onnxruntime (PP-OCRv4: Chinese and Latin script)."""

from collections.abc import Callable, Sequence

import numpy as np
from model_kit.rapidocr import stage_settings
from rapidocr_onnxruntime.ch_ppocr_cls import TextClassifier
from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer

from .groups import read_in_groups
from .strips import strip_of


class Recognizer:
    """Reads lines of text, including upside-down lines."""

    def __init__(self) -> None:
        self._turner = TextClassifier(stage_settings("Cls"))
        self._reader = TextRecognizer(stage_settings("Rec"))
        self._read([np.zeros((48, 320, 3), dtype=np.uint8)])  # warm-up, so that the first request is not slow

    def read(
        self, pixels: np.ndarray, boxes: np.ndarray, check: Callable[[], None] = lambda: None
    ) -> tuple[list[str], list[float]]:
        """Returns the text and the score (0 to 1) for each of boxes [n, 4, 2] in uint8 [height, width, 3], BGR.

        Args:
            check: called between groups of boxes; an exception ends the reading.
        """
        lines = read_in_groups([strip_of(pixels, box) for box in boxes], self._read, check)
        return [text for text, _ in lines], [score for _, score in lines]

    def _read(self, strips: list[np.ndarray]) -> Sequence[tuple[str, float]]:
        upright, *_ = self._turner(strips)
        return self._reader(upright)[0]
