"""Ends a text before the caller's first stop text, for any division of the text into pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Ends the text at the first complete stop text; if several end at the same place, the longest one counts.

    Keeps text that may be the beginning of a stop text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.has_stopped = False

    def add(self, piece: str) -> str:
        """Returns the text that cannot be part of a stop text; empty after a stop text."""
        if not self._stops or self.has_stopped:
            return "" if self.has_stopped else piece
        text = self._held + piece
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if found:
            self.has_stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - self._length_in_doubt(text)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Returns the kept text after the last piece."""
        held, self._held = self._held, ""
        return held

    def _length_in_doubt(self, text: str) -> int:
        """The length of the longest suffix of the text that is a prefix of a stop text."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        lengths = (length for length in range(longest, 0, -1) if self._could_begin(text[-length:]))
        return next(lengths, 0)

    def _could_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
