"""The recognition network of rapidocr-onnxruntime (PP-OCRv4: Chinese and Latin script)."""

import numpy as np
from model_kit.rapidocr import stage_settings
from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer

from .strips import strip_of


class Recognizer:
    """Reads lines of text."""

    def __init__(self) -> None:
        self._network = TextRecognizer(stage_settings("Rec"))

    def read(self, pixels: np.ndarray, boxes: np.ndarray) -> tuple[list[str], list[float]]:
        """The text in each of boxes [n, 4, 2] of uint8 [height, width, 3], BGR, and how sure it is (0 to 1)."""
        lines, _ = self._network([strip_of(pixels, box) for box in boxes])
        return [text for text, _ in lines], [score for _, score in lines]
