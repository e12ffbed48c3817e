"""The order in which requests leave a queue. Pure: no clock, no event loop."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class QueueEntry(Protocol):
    @property
    def priority(self) -> int: ...
    @property
    def key(self) -> str:
        """Entries with the same key belong to one caller."""


E = TypeVar("E", bound=QueueEntry)
Line = OrderedDict[E, None]
"""The entries of one caller, the oldest first."""


class FairQueue(Generic[E]):
    """Serves higher priorities first. Callers of equal priority take turns. Each caller's entries keep their order."""

    def __init__(self) -> None:
        self.size = 0
        """The number of entries."""
        self._lines: dict[int, OrderedDict[str, Line[E]]] = {}
        """By priority, highest first, then by key, in the order of their turns."""

    def add(self, entry: E) -> None:
        lines = self._lines.get(entry.priority)
        if lines is None:
            lines = OrderedDict[str, Line[E]]()
            self._lines = dict(sorted([*self._lines.items(), (entry.priority, lines)], reverse=True))
        lines.setdefault(entry.key, OrderedDict())[entry] = None
        self.size += 1

    def remove(self, entry: E) -> bool:
        """Removes an entry. Returns whether it was in the queue."""
        lines = self._lines.get(entry.priority)
        line = lines.get(entry.key) if lines else None
        if not lines or line is None or entry not in line:
            return False
        del line[entry]
        self.size -= 1
        if not line:
            del lines[entry.key]
        if not lines:
            del self._lines[entry.priority]
        return True

    def take(self, may_run: Callable[[E], bool]) -> E | None:
        """Removes and returns the next entry that may run. Its caller moves to the end of the turn order."""
        for lines in self._lines.values():
            for key, line in lines.items():
                entry = next((each for each in line if may_run(each)), None)
                if entry is not None:
                    lines.move_to_end(key)
                    self.remove(entry)
                    return entry
        return None

    def ahead_of(self, priority: int, key: str) -> int:
        """Returns the number of entries that would leave before a new entry of this caller."""
        ahead = sum(len(line) for each, lines in self._lines.items() if each > priority for line in lines.values())
        lines = self._lines.get(priority)
        if not lines:
            return ahead
        own = len(lines.get(key, ()))
        return ahead + own + sum(min(len(line), own + 1) for each, line in lines.items() if each != key)

    def callers(self) -> int:
        """Returns the number of callers with entries."""
        return sum(map(len, self._lines.values()))

    def displaced_by(self, priority: int, key: str, may_go: Callable[[E], bool]) -> E | None:
        """Returns the entry to refuse in favour of a new entry of this caller, or None.

        It is the newest entry of the caller with the most entries. A caller of the same priority loses an entry only
        if it then still has at least as many entries as the caller of the new entry.
        """
        for each in reversed(self._lines):
            if each > priority:
                return None
            lines = self._lines[each]
            longest = max(lines.values(), key=len)
            if each < priority or len(longest) > len(lines.get(key, ())) + 1:
                found = next((entry for entry in reversed(longest) if may_go(entry)), None)
                if found is not None:
                    return found
        return None
