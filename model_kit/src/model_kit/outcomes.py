"""How a step says that it will not answer: raised for one request, never seen by its neighbours in a dynamic batch."""


class InvalidInput(Exception):
    """The request's tensors do not make sense; becomes INVALID_ARGUMENT. The text must not echo the input."""


class ContractBroken(Exception):
    """A tensor is not what was agreed; becomes INVALID_ARGUMENT, in words that the gateway knows.

    ``text`` has a place ``{model}`` for the name of the model that says so.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class EarlyExit(Exception):
    """There is nothing left to do; becomes ALREADY_EXISTS with the message ``EARLY_EXIT[reason]``.

    Triton and gRPC never answer ALREADY_EXISTS themselves, so the code alone already tells an exit from a fault.
    """

    def __init__(self, reason: str, marker: str | None = None) -> None:
        """``marker``: the message in place of that one, as ``model_kit.signed_exit`` makes it."""
        super().__init__(marker or f"EARLY_EXIT[{reason}]")
        self.reason = reason


class Cancelled(Exception):
    """Nobody waits for the rest of the answer; becomes CANCELLED."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class Overloaded(Exception):
    """A step below has no room for the request; becomes UNAVAILABLE, as Triton answers for a full queue."""
