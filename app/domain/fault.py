"""What Triton says of a fault between the steps of a chain, taken apart.

The names come from a text that a model, and through it a caller, may have written: they are claims. Nobody is shown one
that the pipeline's own graph does not know.
"""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    NOT_GIVEN = "not_given"
    """A step was not given a required input: the step before it answered without that tensor."""
    SHAPE = "shape"
    DATATYPE = "datatype"
    ITEMS = "items"
    """A step was given more items than were agreed, and says so itself: model_kit.contract."""
    SPLIT = "split"
    """A backend could not cut an output into the requests of its batch."""
    RESPONSE_COUNT = "response_count"
    """A script returned another number of responses than it was given requests."""
    RETURNED_DECOUPLED = "returned_decoupled"
    """The script of a decoupled model returned responses instead of sending them."""
    DEADLOCK = "deadlock"
    """An output of an ensemble was never set."""
    CHILD_DECOUPLED = "child_decoupled"
    """A BLS script called a decoupled model as if it had one response."""
    CHILD_NOT_READY = "child_not_ready"
    RAISED = "raised"
    """A script raised: Triton fails every request of its batch with the same text."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``ensemble`` is the innermost that the text names; ``expected`` and ``seen`` are shapes or datatypes.

    Of ``ITEMS``, ``expected`` is a number.
    """

    kind: FaultKind
    ensemble: str = ""
    model: str = ""
    tensor: str = ""
    expected: str = ""
    seen: str = ""
