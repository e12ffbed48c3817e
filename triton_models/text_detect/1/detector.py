"""The detection network of rapidocr-onnxruntime (PP-OCRv4), with the canvas of this model."""

import cv2
import numpy as np
from model_kit.rapidocr import stage_settings
from rapidocr_onnxruntime.ch_ppocr_det import TextDetector

from .canvas import GRID_PX, boxes_in_image, canvas_of, placement_of
from .largest import largest
from .reading_order import reading_order


class Detector:
    """Finds lines of text."""

    def __init__(self, pixel_budget: int, max_boxes: int) -> None:
        self._max_boxes = max_boxes
        self._pixel_budget = pixel_budget
        # The canvas already has the right size; with this limit the package does not resize it.
        self._network = TextDetector(stage_settings("Det", limit_type="min", limit_side_len=GRID_PX))
        self.boxes_in(np.zeros((GRID_PX, GRID_PX, 3), dtype=np.uint8))  # warm-up, so that the first request is not slow

    def boxes_in(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [height, width, 3], BGR -> float32 [n, 4, 2]: corners in pixels, clockwise from the top left."""
        placement = placement_of(*pixels.shape[:2], self._pixel_budget)
        size = (placement.drawn_width, placement.drawn_height)
        canvas = canvas_of(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))
        found, _ = self._network(canvas)
        return reading_order(largest(boxes_in_image(found, placement), self._max_boxes))
