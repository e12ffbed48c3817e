"""Restores the codes of errors of models that a BLS script calls; Triton keeps only the text of these errors."""

from collections.abc import Collection

from model_kit.outcomes import Cancelled, InvalidInput, Overloaded

# Triton's texts for a step whose queue rejected the request.
OVERLOAD_MARKS = ("Exceeds maximum queue size", "Request timeout expired")


def exception_of(message: str, faults: Collection[str]) -> Exception:
    """Returns the exception that restores the error's code.

    Args:
        faults: the complete texts for invalid input of the called model. They are fixed, so no input can imitate them.
    """
    if message in faults:
        return InvalidInput(message)
    if message == str(Cancelled()):
        return Cancelled()
    if any(mark in message for mark in OVERLOAD_MARKS):
        return Overloaded("a step of the model has no room for the request")
    return RuntimeError(message)
