"""Each box of an image -> an upright strip of pixels, as the recognition network reads it."""

import cv2
import numpy as np

MAX_ASPECT = 64  # width over height of a strip: bounds the network's memory, which grows with the longest strip
UPRIGHT_ASPECT = 1.5  # height over width from which a strip is taken for a line written along its height


def strip_of(pixels: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Cut the quadrilateral ``box`` (float32 [4, 2], clockwise from the top left) out of uint8 [height, width, 3]."""
    width, height = strip_size(box)
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float32)
    transform = cv2.getPerspectiveTransform(box, corners)
    strip = cv2.warpPerspective(
        pixels, transform, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    return _bounded(np.rot90(strip) if height >= width * UPRIGHT_ASPECT else strip)


def strip_size(box: np.ndarray) -> tuple[int, int]:
    """Width and height in pixels of a quadrilateral [4, 2]: the longer of its opposite sides, at least 1."""
    top, right, bottom, left = np.linalg.norm(np.roll(box, -1, axis=0) - box, axis=1)
    return max(1, int(max(top, bottom))), max(1, int(max(left, right)))


def _bounded(strip: np.ndarray) -> np.ndarray:
    height, width = strip.shape[:2]
    if width <= height * MAX_ASPECT:
        return strip
    return cv2.resize(strip, (height * MAX_ASPECT, height), interpolation=cv2.INTER_AREA)
