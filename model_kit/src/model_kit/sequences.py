"""The states of a model with ``sequence_batching``: one for each open sequence.

Triton tells a model when a sequence starts and ends, but not when it drops an idle one. So the number of states is
limited to the number of sequences that Triton runs at a time, and the state that was not used for longest makes place.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from model_kit.outcomes import InvalidInput

State = TypeVar("State")

# Triton's own words for a sequence that it does not know: both mean that the caller must start again.
NOT_OPEN = "the state is lost: must specify the START flag on the first request of the sequence"
# Triton counts the idle time from the arrival of a step, a model from its execution, which may be later.
IDLE_FACTOR = 2


@dataclass(frozen=True)
class Step:
    """What the control inputs of a request say."""

    sequence_id: int
    starts: bool
    ends: bool


@dataclass(frozen=True)
class Limits:
    """The largest number of states, and the time after which an unused state is freed at the next start."""

    states: int
    idle_s: float

    @classmethod
    def of(cls, args: Mapping[str, str]) -> "Limits":
        """Reads ``sequence_batching`` of config.pbtxt from the arguments of ``initialize``."""
        batching = json.loads(args["model_config"])["sequence_batching"]
        idle_s = int(batching["max_sequence_idle_microseconds"]) / 1e6
        return cls(int(batching["oldest"]["max_candidate_sequences"]), IDLE_FACTOR * idle_s)


@dataclass
class _Open(Generic[State]):
    state: State
    used_at: float


class Sequences(Generic[State]):
    def __init__(self, limits: Limits, make: Callable[[], State], clock: Callable[[], float] = time.monotonic) -> None:
        """``make`` returns the state of a sequence that starts."""
        self._limits = limits
        self._make = make
        self._clock = clock
        # The sequence that was not used for longest is the first.
        self._open: OrderedDict[int, _Open[State]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def state_of(self, step: Step) -> Iterator[State]:
        """Yields the state for the duration of a step, and frees it after the last one.

        Raises:
            InvalidInput: If the sequence is not open and the step does not start it.
        """
        if step.starts:
            self._start(step.sequence_id)
        entry = self._open.get(step.sequence_id)
        if entry is None:
            raise InvalidInput(NOT_OPEN)
        try:
            yield entry.state
        finally:
            entry.used_at = self._clock()
            self._open.move_to_end(step.sequence_id)
            if step.ends:
                del self._open[step.sequence_id]

    def _start(self, sequence_id: int) -> None:
        self._open.pop(sequence_id, None)
        while self._open and self._must_make_place():
            self._open.popitem(last=False)
        self._open[sequence_id] = _Open(self._make(), self._clock())

    def _must_make_place(self) -> bool:
        idle_s = self._clock() - next(iter(self._open.values())).used_at
        return len(self._open) >= self._limits.states or idle_s > self._limits.idle_s


def step_of(read: Callable[[str], Any]) -> Step:
    """Returns the step of a request. ``read``: the name of a control input -> its array of one element."""
    return Step(int(read("ID").item()), bool(read("START").item()), bool(read("END").item()))
