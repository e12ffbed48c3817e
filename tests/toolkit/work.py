"""Counts the work of a call, without a clock: calls of functions, and characters that are copied."""

import sys
from collections.abc import Callable
from typing import Any, SupportsIndex

SHORT = 20_000


class CountedText(str):
    """A text that counts the characters of what is cut out of it or joined with it. A short part is a plain text."""

    __slots__ = ()
    copied = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return self._counted(super().__getitem__(key))

    def __add__(self, other: str) -> str:
        return self._counted(super().__add__(other))

    def __radd__(self, other: str) -> str:
        return self._counted(str(other) + str(self))

    def lstrip(self, chars: str | None = None) -> str:
        return self._counted(super().lstrip(chars))

    @staticmethod
    def _counted(text: str) -> str:
        CountedText.copied += len(text)
        return CountedText(text) if len(text) > SHORT else text


def work_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Returns the number of function calls, and of characters of a CountedText that were copied."""
    calls, copied = 0, CountedText.copied

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls, CountedText.copied - copied


def grows_with(work: Callable[[int], Callable[[], Any]], size: int) -> bool:
    """Whether four times the size makes at most about four times the work. ``work``: prepares that of a size."""
    small, large = work_of(work(size)), work_of(work(4 * size))
    return all(much <= 5 * few + 100_000 for few, much in zip(small, large, strict=True))
