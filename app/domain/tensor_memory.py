"""Memory that an engine hands out for what will be a tensor."""

from typing import Protocol

ELEMENT = -4
"""Where the tensor begins if the whole memory is one element of BYTES: its length, in 4 bytes, stands before it.

Source: Open Inference Protocol, "Tensor Data"."""


class TensorMemory(Protocol):
    """A tensor that lies in this memory in its raw form reaches the model without a copy."""

    def take(self, size: int, tensor_at: int) -> memoryview | None:
        """``size`` bytes with arbitrary content; None if there is no such memory now.

        ``tensor_at``: where in them the first tensor begins, so that it can be aligned; or ELEMENT.
        """

    def give_back(self, memory: memoryview) -> None:
        """What :meth:`take` returned. Nothing may refer to it any more. Call this after the calls that used it."""
