"""Memory that an engine hands out for what will be a tensor."""

from typing import Protocol


class TensorMemory(Protocol):
    """An element of a BYTES tensor that lies in this memory reaches the model without a copy."""

    def take(self, size: int) -> memoryview | None:
        """``size`` bytes with arbitrary content; None if there is no such memory now."""

    def give_back(self, memory: memoryview) -> None:
        """What :meth:`take` returned. Nothing may refer to it any more. Call this after the calls that used it."""
