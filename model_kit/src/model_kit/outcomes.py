"""Exceptions for a single request, which do not affect the other requests of its dynamic batch."""


class InvalidInput(Exception):
    """The request's tensors are invalid; becomes INVALID_ARGUMENT. The text must not contain the input."""


class ContractBroken(Exception):
    """A tensor violates its contract; becomes INVALID_ARGUMENT, with a message that the gateway recognizes.

    ``text`` has the placeholder ``{model}`` for the name of the reporting model.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class EarlyExit(Exception):
    """An early exit; becomes ALREADY_EXISTS with the message ``EARLY_EXIT[reason]``.

    Triton and gRPC never return ALREADY_EXISTS themselves, so the code alone distinguishes an exit from a fault.
    """

    def __init__(self, reason: str, marker: str | None = None) -> None:
        """``marker``: a different message, from ``model_kit.signed_exit``."""
        super().__init__(marker or f"EARLY_EXIT[{reason}]")
        self.reason = reason


class Cancelled(Exception):
    """The request was abandoned; becomes CANCELLED."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class Overloaded(Exception):
    """A called model's queue is full; becomes UNAVAILABLE, as in Triton."""
