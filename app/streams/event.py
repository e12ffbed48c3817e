"""One event of a stream, as it stands in the log and goes over the wire."""

from typing import Literal, NamedTuple

EventName = Literal["output", "done", "error"]

TERMINAL: frozenset[str] = frozenset({"done", "error"})


class Event(NamedTuple):
    """``id`` counts from 1 without gaps; ``data`` is JSON on one line."""

    id: int
    name: EventName
    data: bytes

    @property
    def size(self) -> int:
        """Bytes held by the event, its own few aside."""
        return len(self.data)

    @property
    def is_terminal(self) -> bool:
        return self.name in TERMINAL
