"""When a call of Triton may be repeated: the rule for one Triton and for several."""

from app.domain.errors import Unavailable
from app.domain.inference import InferenceRequest


def may_repeat(error: Unavailable, request: InferenceRequest) -> bool:
    """A request that Triton did not work on is always safe to send; another request only if it is idempotent.

    A Triton that works, and is overloaded, is not asked to do the work twice.
    """
    return not error.was_sent or (request.idempotent and not error.was_answered)
