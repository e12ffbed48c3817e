"""Reads strips of similar proportions together, a few at a time."""

from collections.abc import Callable, Sequence

import numpy as np

GROUP = 6  # the batch of both networks


def read_in_groups(
    strips: Sequence[np.ndarray],
    read: Callable[[list[np.ndarray]], Sequence[tuple[str, float]]],
    check: Callable[[], None],
) -> list[tuple[str, float]]:
    """Returns the text and the score of each strip [height, width, 3], in the order of the strips.

    Args:
        check: called before each group; an exception ends the reading.
    """
    order = sorted(range(len(strips)), key=lambda index: strips[index].shape[1] / strips[index].shape[0])
    found: dict[int, tuple[str, float]] = {}
    for start in range(0, len(order), GROUP):
        check()
        group = order[start : start + GROUP]
        found.update(zip(group, read([strips[index] for index in group]), strict=True))
    return [found[index] for index in range(len(strips))]
