"""What the error of a BLS child means: the server drops its code on the way and keeps its text."""

from collections.abc import Collection

from model_kit.outcomes import Cancelled, InvalidInput, Overloaded

# Triton's own texts for a step whose queue refused the request.
OVERLOAD_MARKS = ("Exceeds maximum queue size", "Request timeout expired")


def exception_of(message: str, faults: Collection[str]) -> Exception:
    """The exception that gives the error its code again.

    Args:
        faults: the whole texts with which the child refuses its input. They are fixed, so no input can imitate them.
    """
    if message in faults:
        return InvalidInput(message)
    if message == str(Cancelled()):
        return Cancelled()
    if any(mark in message for mark in OVERLOAD_MARKS):
        return Overloaded("a step of the model has no room for the request")
    return RuntimeError(message)
