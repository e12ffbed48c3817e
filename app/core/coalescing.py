"""What a pipeline declares and the gateway knows about shared calls: one call to a model for several small requests.

:mod:`app.core.rows` joins requests and cuts responses. The engine of :mod:`app.triton.coalescing` shares the calls,
and :mod:`app.pipelines.trial` shows for each version of a model that a row does not depend on the rows beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from app.core.trace import TraceContext


@dataclass(frozen=True, slots=True)
class CoalescingFault:
    """Why requests do not share calls. ``output``: the output at fault; empty if there is none."""

    text: str
    output: str = ""

    def __str__(self) -> str:
        return f"output '{self.output}' {self.text}" if self.output else self.text


@dataclass(slots=True, eq=False)
class Coalescing:
    """The shared calls of one compiled pipeline. Compared by identity.

    ``max_items`` and ``max_bytes``: limits of one call. ``steps``: how many models a request runs through.
    ``outputs``: those that the model must write if a request names none, and their dims without the batch.
    """

    max_items: int
    max_bytes: int
    outputs: Mapping[str, tuple[int, ...]]
    steps: int = 1
    tolerance: float = 0.0
    needs_trial: bool = True
    """Whether a version of the model answered that no trial has seen."""
    fault: CoalescingFault | None = None
    """The newest reason why requests do not share calls."""
    proven: set[str] = field(default_factory=set)
    """The versions for which the rows of a shared call may be given to their callers."""
    _tried: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)

    @property
    def is_on(self) -> bool:
        return not self.needs_trial and bool(self.proven)

    def saw(self, version: str) -> None:
        """Call this for each version that answers. No requests share a call until the trial of a new version."""
        if version not in self._tried:
            self.needs_trial = True

    def prove(self, version: str) -> None:
        """The trial of a version passed. A no-op if a call of this version did not have the rows of its requests."""
        self._tried.add(version)
        if version in self._ended:
            self.needs_trial = False
            return
        self.proven.add(version)
        self.needs_trial, self.fault = False, None

    def refuse(self, version: str, fault: CoalescingFault) -> None:
        """The trial of a version failed."""
        self._tried.add(version)
        self.proven.discard(version)
        self.needs_trial, self.fault = False, fault

    def end(self, version: str, fault: CoalescingFault) -> None:
        """A call of a version did not have the rows of its requests, although its trial had passed."""
        self._ended.add(version)
        self.refuse(version, fault)


class SharedCall(Struct, eq=False):
    """The call that a request shared. The engine fills it; without other requests in the call it stays empty."""

    requests: int = 0
    """The number of requests in the call."""
    request_id: str = ""
    """The id with which Triton knows the call."""
    trace: TraceContext | None = None
    """The trace to which the call belongs: that of one of its requests."""

    def set(self, requests: int, request_id: str, trace: TraceContext | None) -> None:
        self.requests, self.request_id, self.trace = requests, request_id, trace

    def clear(self) -> None:
        self.set(0, "", None)
