"""Decides whether a failed call may be repeated, at the same Triton or at another."""

from app.domain.errors import Unavailable
from app.domain.inference import InferenceRequest


def may_repeat(error: Unavailable, request: InferenceRequest) -> bool:
    """Whether a failed request may be sent again: if Triton did not process it, or if it is idempotent.

    A request that failed because Triton is overloaded is not repeated.
    """
    return not error.was_sent or (request.idempotent and not error.was_answered)
