"""The parsed form of Triton's errors about the steps of an ensemble.

The names come from a text that a model, or a caller through a model, may have written, so they cannot be trusted. The
gateway shows only names that the pipeline's graph contains.
"""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    NOT_GIVEN = "not_given"
    """A step did not receive a required input, because the previous step did not write that tensor."""
    SHAPE = "shape"
    DATATYPE = "datatype"
    ITEMS = "items"
    """A step received more items than its contract allows, and reported it itself (model_kit.contract)."""
    SPLIT = "split"
    """A backend could not split an output into the requests of its batch."""
    RESPONSE_COUNT = "response_count"
    """A script returned a different number of responses than it received requests."""
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
    """``ensemble`` is the innermost ensemble in the text; ``expected`` and ``seen`` are shapes or datatypes.

    For ``ITEMS``, ``expected`` is a number.
    """

    kind: FaultKind
    ensemble: str = ""
    model: str = ""
    tensor: str = ""
    expected: str = ""
    seen: str = ""
