"""The base class of the parsers.

A parser is one generator, ``_run``, which waits with ``_more`` where it needs more text to decide. Its steps depend on
characters only, never on the pieces in which they came. Each character is read a constant number of times.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, TypeVar

from msgspec import Struct

MAX_HELD = 16_384
"""Characters that a parser holds while it cannot decide whether they are a call. Above that they are text."""
_MAX_SPACE = 256

Tools = Mapping[str, Mapping[str, Any]]
"""The name of each function -> the JSON schema of its parameters."""
Kind = Literal["text", "reasoning", "call", "arguments"]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class Part(Struct, frozen=True):
    """A part of an answer. Of a call, ``text`` is the name; its arguments follow in pieces."""

    kind: Kind
    text: str


class Parser(ABC):
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        """What was not given out yet."""
        self._has_ended = False
        self._parts: list[Part] = []
        self._space = ""
        """White space at the end of the text so far. It is dropped before a call, and at the end after a call."""
        self._is_long_space = False
        self._has_call = False
        self._steps = self._run()

    @property
    def held(self) -> int:
        """The number of characters that were not given out."""
        return len(self._text) + len(self._space)

    def add(self, text: str) -> list[Part]:
        """Returns the parts that are certain."""
        self._text += text
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Returns the rest, after the last text."""
        self._has_ended = True
        parts, space, self._space = self.add(""), self._space, ""
        return parts if self._has_call or not space else [*parts, Part("text", space)]

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Gives out the whole text."""

    def _more(self) -> Steps[bool]:
        """Waits for more text. Returns False at the end, or if too much is held."""
        if self._has_ended or len(self._text) >= MAX_HELD:
            return False
        yield
        return True

    def _give(self, kind: Kind, text: str) -> None:
        if kind == "text":
            text = self._without_space(text)
        elif kind == "call":
            self._space, self._is_long_space, self._has_call = "", False, True
        if text:
            self._parts.append(Part(kind, text))

    def _without_space(self, text: str) -> str:
        """Keeps white space at the end back."""
        bare = text.rstrip()
        space = text[len(bare) :] if bare else self._space + text
        bare = self._space + bare if bare else ""
        self._is_long_space = len(space) > _MAX_SPACE or (self._is_long_space and not bare)
        if self._is_long_space:
            self._space = ""
            return bare + space
        self._space = space
        return bare

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _as_text(self, before: str, length: int = MAX_HELD) -> None:
        """Gives out what is no call: text that was taken, and text that is held."""
        self._give("text", before + self._take(length))

    def _until(
        self, *markers: str, kind: Kind = "text", as_written: Callable[[str], str] = lambda text: text
    ) -> Steps[str]:
        """Gives text out up to the first marker. Takes and returns the marker; empty at the end of the text."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text)
            certain = found.start() if found else len(self._text) - self._in_doubt(markers)
            self._give(kind, as_written(self._take(certain)))
            if found:
                return self._take(len(found.group()))
            if not (yield from self._more()):
                self._give(kind, as_written(self._take(len(self._text))))
                return ""

    def _everything(self) -> Steps[None]:
        """Gives out the rest as text."""
        while True:
            self._give("text", self._take(len(self._text)))
            if not (yield from self._more()):
                return

    def _in_doubt(self, markers: tuple[str, ...]) -> int:
        """The length of the longest end of the text that may begin a marker."""
        longest = min(len(self._text), max(map(len, markers)) - 1)
        ends = (length for length in range(longest, 0, -1) if self._could_begin(self._text[-length:], markers))
        return next(ends, 0)

    @staticmethod
    def _could_begin(end: str, markers: tuple[str, ...]) -> bool:
        return any(marker.startswith(end) for marker in markers)

    def _starts(self, *texts: str) -> Steps[str]:
        """Takes and returns the one of these that comes next; empty if none does. None begins with another."""
        while True:
            found = next((text for text in texts if self._text.startswith(text)), "")
            if found or not self._could_begin(self._text, texts) or not (yield from self._more()):
                return self._take(len(found))

    def _white(self, further: str = "") -> Steps[str]:
        """Takes and returns white space, and ``further`` characters, at most MAX_HELD."""
        characters = " \t\r\n" + further
        while True:
            length = len(self._text) - len(self._text.lstrip(characters))
            if min(length, MAX_HELD) < len(self._text) or not (yield from self._more()):
                return self._take(min(length, MAX_HELD))

    def _head(
        self, pattern: re.Pattern[str], longest: int, may_begin: Callable[[str], object] = lambda _text: True
    ) -> Steps["re.Match[str] | None"]:
        """Returns the match at the beginning, which ends within ``longest`` characters.

        The pattern ends with a character that it can have nowhere else. ``may_begin``: whether a text without a match
        may get one.
        """
        while True:
            head = self._text[:longest]
            found = pattern.match(head)
            if found or len(head) == longest or not may_begin(head) or not (yield from self._more()):
                return found
