"""Places an image on the canvas for the detection network, and converts boxes on the canvas back to the image.

The network requires sides that are multiples of 32. The image is scaled down with its aspect ratio, but never up,
because this takes time and joins words. The edge of the image fills the rest of the canvas, so that images of any size
work, such as a single pixel or a very long strip.
"""

from dataclasses import dataclass

import numpy as np

GRID_PX = 32
MARGIN_PX = 16  # text at the edge of the image is found only with a margin around it
MAX_SIDE_PX = 4096


@dataclass(frozen=True)
class Placement:
    """An image of ``height`` x ``width`` pixels, and its size on the canvas, from (MARGIN_PX, MARGIN_PX)."""

    height: int
    width: int
    drawn_height: int
    drawn_width: int


def placement_of(height: int, width: int, pixel_budget: int) -> Placement:
    """The largest size of the image within ``pixel_budget`` pixels and MAX_SIDE_PX per side."""
    scale = min(1.0, (pixel_budget / (height * width)) ** 0.5, MAX_SIDE_PX / max(height, width))
    return Placement(height, width, max(1, round(height * scale)), max(1, round(width * scale)))


def canvas_of(drawn: np.ndarray) -> np.ndarray:
    """uint8 [h, w, 3] -> the same with a margin all around and sides that are multiples of GRID_PX."""
    height, width = drawn.shape[:2]
    return np.pad(drawn, (_padding(height), _padding(width), (0, 0)), mode="edge")


def boxes_in_image(boxes: np.ndarray, placement: Placement) -> np.ndarray:
    """Converts boxes on the canvas to pixels of the image, clips them, and drops boxes in the margin.

    Args:
        boxes: [n, 4, 2], x and y.

    Returns:
        float32 [m, 4, 2].
    """
    drawn = np.array([placement.drawn_width, placement.drawn_height])
    image = np.array([placement.width, placement.height])
    inside = np.clip((boxes.reshape(-1, 4, 2) - MARGIN_PX) * (image / drawn), 0, image)
    return inside[np.ptp(inside, axis=1).min(axis=1) >= 1].astype(np.float32)


def _padding(side: int) -> tuple[int, int]:
    return MARGIN_PX, MARGIN_PX + -(side + 2 * MARGIN_PX) % GRID_PX
