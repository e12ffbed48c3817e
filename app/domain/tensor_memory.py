"""Memory that an engine hands out for what will be a tensor."""

from typing import Protocol

ELEMENT = -4
"""Offset of the tensor if the whole memory is one BYTES element, whose length precedes it in 4 bytes.

Source: Open Inference Protocol, "Tensor Data"."""


class TensorMemory(Protocol):
    """Provides memory from which a raw tensor reaches the model without a copy."""

    def take(self, size: int, tensor_at: int) -> memoryview | None:
        """Returns ``size`` bytes with arbitrary content; None if no memory is available.

        ``tensor_at``: the offset of the first tensor, so that it can be aligned; or ELEMENT.
        """

    def give_back(self, memory: memoryview) -> None:
        """Returns memory from :meth:`take`. Call this after the calls that used it, without remaining references."""
