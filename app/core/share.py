"""The part of one process in a limit that several processes divide."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """``number``: of this process, from 1. ``of``: how many processes divide the limits."""

    number: int = 1
    of: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this process is the only one."""
        return self.of == 1

    def part(self, total: int) -> int:
        """All parts together are ``total``, so a part may be 0."""
        return total // self.of + (self.number <= total % self.of)


WHOLE = Share()
"""Of the only process."""
