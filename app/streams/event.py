"""One event of a stream, as stored in the log and sent to clients."""

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
        """The event's size in bytes, without the overhead of the object."""
        return len(self.data)

    @property
    def is_terminal(self) -> bool:
        return self.name in TERMINAL
