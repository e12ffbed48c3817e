"""Divides the text of a model into text, reasoning and calls: the base class of the parsers, and those of reasoning.

A parser is one generator, ``_run``, which waits with ``_more`` where it needs more text to decide. Its steps depend on
characters only, never on the pieces in which they came. The time grows with the length of the text only: what is not
decided is limited by MAX_HELD, white space by MAX_SPACE, and given text is only passed over, not cut off.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import Struct

MAX_HELD = 16_384
"""Characters that a parser holds while it cannot decide whether they are a call. Above that they are text."""
MAX_SPACE = 256
"""Characters of white space between the parts of a call. Text follows if there are more."""
MAX_CALLS = 1024
"""Calls of an answer. What follows is text."""

Tools = Mapping[str, Mapping[str, Any]]
"""The name of each function -> the JSON schema of its parameters."""
Kind = Literal["text", "reasoning", "call", "arguments"]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class Part(Struct, frozen=True):
    """A part of an answer. Of a call, ``text`` is the name; its arguments follow in pieces."""

    kind: Kind
    text: str


def begun_at(text: str, start: int, markers: Sequence[str]) -> int:
    """Where the longest end of the text behind ``start`` begins that begins a marker; the text's length if none."""
    first = length = len(text)
    for marker in markers:
        place = text.find(marker[0], max(start, length - len(marker) + 1))
        while place >= 0 and not marker.startswith(text[place:]):
            place = text.find(marker[0], place + 1)
        if 0 <= place < first:
            first = place
    return first


class Markers(NamedTuple):
    """Markers to look for. ``begun``: where the end of a text, behind a place, may be the beginning of one."""

    whole: re.Pattern[str]
    begun: Callable[[str, int], int]

    @classmethod
    @lru_cache
    def of(cls, *markers: str, whole: str = "", begun: str = r"(?!)", longest: int = 0) -> "Markers":
        """``whole``: a further marker as an expression; ``begun``: its beginning, of at most ``longest`` characters."""
        search = re.compile(begun, re.ASCII).search

        def begun_in(text: str, start: int) -> int:
            found, own = search(text, max(start, len(text) - longest)), begun_at(text, start, markers)
            return own if found is None else min(found.start(), own)

        texts = [re.escape(each) for each in sorted(markers, key=len, reverse=True)]
        expression = re.compile("|".join([*texts, whole] if whole else texts), re.ASCII)
        return cls(expression, begun_in if longest else partial(begun_at, markers=markers))


NOTHING = Markers.of(whole=r"(?!)")
"""Gives out the rest."""


class Parser(ABC):
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._at = 0
        """The place in the text of the next character."""
        self._has_ended = False
        self._parts: list[Part] = []
        self._space = ""
        """White space at the end of the text so far. It is dropped before a call, and at the end after a call."""
        self._is_long_space = False
        self._calls = 0
        self._steps = self._run()

    def add(self, text: str) -> list[Part]:
        """Returns the parts that are certain."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Returns the rest, after the last text."""
        self._has_ended = True
        parts, space, self._space = self.add(""), self._space, ""
        return parts if self._calls or not space else [*parts, Part("text", space)]

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Gives out the whole text."""

    def _more(self) -> Steps[bool]:
        """Waits for more text. Returns False at the end, or if too much is held."""
        if self._has_ended or len(self._text) - self._at >= MAX_HELD:
            return False
        yield
        return True

    def _give(self, kind: Kind, text: str) -> None:
        """Keeps white space at the end of a text back."""
        if kind == "text":
            bare = text.rstrip()
            space = text[len(bare) :] if bare else self._space + text
            text = self._space + bare if bare else ""
            self._is_long_space = len(space) > MAX_SPACE or (self._is_long_space and not bare)
            if self._is_long_space:
                text, space = text + space, ""
            self._space = space
        elif kind == "call":
            self._space, self._is_long_space, self._calls = "", False, self._calls + 1
            if self._calls == MAX_CALLS:
                self._tools = {}
        if text:
            self._parts.append(Part(kind, text))

    def _next(self, length: int = 1) -> str:
        """The next characters, as far as they are known."""
        return self._text[self._at : self._at + length]

    def _take(self, length: int) -> str:
        taken = self._next(length)
        self._at += len(taken)
        return taken

    def _until(self, marks: Markers, kind: Kind = "text", as_written: Callable[[str], str] = str) -> Steps[str]:
        """Gives text out up to the first marker. Takes and returns the marker; empty at the end of the text."""
        while True:
            found = marks.whole.search(self._text, self._at)
            first = found.start() if found else marks.begun(self._text, self._at)
            self._give(kind, as_written(self._take(first - self._at)))
            if found:
                return self._take(len(found[0]))
            if not (yield from self._more()):
                self._give(kind, as_written(self._take(MAX_HELD)))
                return ""

    def _starts(self, *texts: str) -> Steps[str]:
        """Takes and returns the one of these that comes next; empty if none does. None begins with another."""
        longest = max(map(len, texts))
        while True:
            head = self._next(longest)
            found = next((text for text in texts if head.startswith(text)), "")
            if found or not any(text.startswith(head) for text in texts) or not (yield from self._more()):
                return self._take(len(found))

    def _white(self, further: str = "") -> Steps[str]:
        """Takes and returns white space, and ``further`` characters, at most MAX_SPACE. Then the next one is known."""
        while True:
            head = self._next(MAX_SPACE + 1)
            length = len(head) - len(head.lstrip(" \t\r\n" + further))
            if length < len(head) or length > MAX_SPACE or not (yield from self._more()):
                return self._take(min(length, MAX_SPACE))

    def _find(self, marker: str, longest: int) -> Steps[str | None]:
        """Returns what precedes a marker, and takes nothing; None if both have more than ``longest`` characters."""
        read = 0
        while True:
            index = self._text.find(marker, self._at + read, self._at + longest)
            if index >= 0:
                return self._text[self._at : index]
            length = len(self._text) - self._at
            read = max(length - len(marker), 0)
            if length >= longest or not (yield from self._more()):
                return None


class ReasoningParser(Parser):
    """Reasoning between tags at the beginning of an answer."""

    def __init__(self, beginning: str, end: str, calls: Parser | None, *, is_inside: bool) -> None:
        """``calls``: reads the text after the reasoning. ``is_inside``: the prompt already has the beginning."""
        self._tags = beginning, end
        self._after = calls
        self._is_inside = is_inside
        super().__init__({})

    def finish(self) -> list[Part]:
        return [*super().finish(), *(self._after.finish() if self._after is not None else ())]

    def _run(self) -> Steps[None]:
        beginning, end = self._tags
        space = yield from self._white()
        if (yield from self._starts(beginning)) or self._is_inside:
            yield from self._white()
            yield from self._until(Markers.of("\n" + end, end), "reasoning")
            yield from self._white()
        else:
            self._give("text", space)
        yield from self._until(NOTHING)

    def _give(self, kind: Kind, text: str) -> None:
        if kind == "text" and self._after is not None:
            self._parts += self._after.add(text)
        else:
            super()._give(kind, text)


_HEADS = ("<|start|>", "<|channel|>")
_MARKS = Markers.of(*_HEADS, "<|end|>", "<|call|>", "<|return|>")
_MESSAGE = "<|message|>"
_LONGEST_HEAD = 512
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]{1,64})", re.ASCII)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class GptOssParser(Parser):
    """gpt-oss: messages in the channels ``analysis``, ``commentary`` and ``final`` of OpenAI's harmony format.

    ``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}<|call|>``. The recipient may precede the channel. Source: OpenAI's description of
    the format. The markers are special tokens.
    """

    def _run(self) -> Steps[None]:
        kind: Kind = "text"
        while marker := (yield from self._until(_MARKS, kind)):
            kind = "text"
            head = (yield from self._find(_MESSAGE, _LONGEST_HEAD)) if marker in _HEADS else ""
            if head is None:
                self._give("text", marker)
            elif marker in _HEADS:
                head = marker + self._take(len(head) + len(_MESSAGE))
                recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
                if recipient is None:
                    kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
                elif recipient[1] in self._tools:
                    self._give("call", recipient[1])
                    kind = "arguments"
                else:
                    self._give("text", head)
