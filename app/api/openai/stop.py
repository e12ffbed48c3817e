"""Ends a text before the first of the caller's stop texts, however the text is cut into pieces."""

from collections.abc import Sequence


class StopMatcher:
    """The text ends where the first stop text is complete; of several that end there, at the start of the longest.

    What could still become a stop text is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.has_stopped = False

    def add(self, piece: str) -> str:
        """The text that is certain now. Empty after a stop text."""
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
        """What was held back, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _length_in_doubt(self, text: str) -> int:
        """The length of the longest end of the text with which a stop text begins."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        lengths = (length for length in range(longest, 0, -1) if self._could_begin(text[-length:]))
        return next(lengths, 0)

    def _could_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
