"""Cuts boxes of an image into strips of pixels along the line of text, for the recognition network."""

import cv2
import numpy as np

from .strip_shape import bounded_width, is_upright, strip_size


def strip_of(pixels: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Cut the quadrilateral ``box`` (float32 [4, 2], clockwise from the top left) out of uint8 [height, width, 3]."""
    width, height = strip_size(box)
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float32)
    strip = cv2.warpPerspective(
        pixels,
        cv2.getPerspectiveTransform(box, corners),
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return _bounded(np.rot90(strip) if is_upright(width, height) else strip)


def _bounded(strip: np.ndarray) -> np.ndarray:
    height, width = strip.shape[:2]
    return cv2.resize(strip, (bounded_width(width, height), height), interpolation=cv2.INTER_AREA)
