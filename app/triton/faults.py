"""Parses Triton's messages about faults inside a chain of models.

Sources: Triton 2.51 (each text was observed, or is in its binary), and ``model_kit.contract``, with which a model
reports faults that Triton does not check. A text may be anywhere in the message: an ensemble adds the prefixes
``in ensemble 'e', `` and ``[request id: r] ``, and a BLS script may include the error of a child. The first matching
row wins.
"""

import re

from app.domain.fault import Fault, FaultKind

_MODEL = r"'(?P<model>[^']*)'"
_SHAPE = r"\[[-\d,]*\]"
_SCRIPT = r"Failed to process the request\(s\) for model (?:instance )?'(?P<model>[^']*?)(?:_\d+_\d+)?', message: "

_PATTERN_BY_KIND = (
    (
        FaultKind.NOT_GIVEN,
        rf"expected \d+ inputs but got \d+ inputs for model {_MODEL}\..*"
        r"missing required input\(s\) \['(?P<tensor>[^']*)'",
    ),
    (
        FaultKind.SHAPE,
        rf"unexpected shape for input '(?P<tensor>[^']*)' for model {_MODEL}\. "
        rf"Expected (?P<expected>{_SHAPE}), got (?P<seen>{_SHAPE})",
    ),
    (
        FaultKind.DATATYPE,
        rf"inference input '(?P<tensor>[^']*)' data-type is '(?P<seen>[A-Z0-9]+)', but model {_MODEL} "
        r"expects '(?P<expected>[A-Z0-9]+)'",
    ),
    (
        FaultKind.ITEMS,
        rf"too many items in input '(?P<tensor>[^']*)' for model {_MODEL}\. "
        rf"Expected at most (?P<expected>\d{{1,9}}), got (?P<seen>{_SHAPE})",
    ),
    (FaultKind.SPLIT, r"failed to split the output tensor '(?P<tensor>[^']*)' in responses"),
    (FaultKind.RESPONSE_COUNT, rf"{_SCRIPT}Number of InferenceResponse objects do not match"),
    (
        FaultKind.RETURNED_DECOUPLED,
        rf"{_SCRIPT}Python model '[^']*' is using the decoupled mode and the execute function must return None",
    ),
    (FaultKind.DEADLOCK, r"unexpected deadlock, at least one output is not set"),
    (FaultKind.CHILD_DECOUPLED, r"Model (?P<model>[^ ]+) - Error when running inference: .* is using the decoupled"),
    (FaultKind.CHILD_NOT_READY, r"Model (?P<model>[^ ]+) - Error when running inference: .* is not ready"),
    (FaultKind.RAISED, _SCRIPT),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERN_BY_KIND)
_LONGEST_MESSAGE = 4096
_ENSEMBLE = re.compile(r"in ensemble '([^']*)', ")


def fault_in(message: str) -> Fault | None:
    message = message[:_LONGEST_MESSAGE]
    for kind, pattern in _PATTERNS:
        if found := pattern.search(message):
            return Fault(kind, _innermost_ensemble(message[: found.start()]), **found.groupdict())
    return None


def _innermost_ensemble(prefix: str) -> str:
    names: list[str] = _ENSEMBLE.findall(prefix)
    return names[-1] if names else ""
