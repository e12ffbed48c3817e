"""Calls that are JSON objects: ``{"name": ..., "arguments": {...}}``, also with ``parameters``."""

import re
from typing import Any

import msgspec

from app.core.json import json_of
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Markers, Parser, Steps

_ARGUMENTS = ("arguments", "parameters")
_JSON = re.compile(r'["{}\[\]]')
_INSIDE = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
"""The characters that count outside a string of JSON, and inside each kind of string."""


class Extent:
    """Finds the end of a value while its text grows. Only brackets and strings count.

    ``outside``: the characters that count outside a string. ``depth``: of brackets that begin before the text.
    """

    def __init__(self, depth: int = 0, outside: re.Pattern[str] = _JSON) -> None:
        self._depth = depth
        self._outside = outside
        self._inside: re.Pattern[str] | None = None
        self.length = 0
        """The characters that were read."""
        self.nested = 0
        """The characters before the first object in the outer object."""

    def ends(self, text: str, start: int, longest: int) -> bool:
        """Reads on in the text from ``start``; returns whether the value ends after ``length`` characters."""
        place, end = start + self.length, min(start + longest, len(text))
        while found := (self._inside or self._outside).search(text, place, end):
            mark, place = found[0], found.end()
            if mark == "\\":
                place += 1
            elif mark in _INSIDE:
                self._inside = None if self._inside else _INSIDE[mark]
            elif mark in "{[(":
                self._depth += 1
                if mark == "{" and self._depth == 2 and not self.nested:
                    self.nested = found.start() - start
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self.length = place - start
                    return True
        self.length = max(place, end) - start
        return False


class JsonCallParser(Parser):
    def _json_calls(self, before: str, end: str = "") -> Steps[None]:
        """Reads the calls that come next, and ``end`` after them. What is no call is text, after ``before``.

        White space, commas and semicolons may separate them.
        """
        before += yield from self._white()
        if self._next() != "{":
            self._give("text", before)
            return
        while self._next() == "{":
            if not (yield from self._json_call(before)):
                return
            before = yield from self._white(",;")
        if self._next() and not (end and (yield from self._starts(end))):
            self._give("text", before)

    def _json_call(self, before: str) -> Steps[bool]:
        """Reads the object that comes next. One that is no call is given out as text, after ``before``.

        The arguments are given out while they grow if the name comes before them.
        """
        extent, is_tried = Extent(), False
        while True:
            is_whole = extent.ends(self._text, self._at, MAX_HELD)
            if extent.nested and not is_tried:
                is_tried = True
                if self._named(self._next(extent.nested)):
                    self._take(extent.nested)
                    yield from self._object()
                    yield from self._rest_of_call()
                    return True
            length = min(extent.length, MAX_HELD)
            if is_whole and self._whole(self._next(length)):
                self._take(length)
                return True
            if is_whole or not (yield from self._more()):
                self._give("text", before + self._take(length))
                return False

    def _object(self) -> Steps[None]:
        """Gives out the object that comes next as arguments."""
        extent = Extent()
        while True:
            is_whole = extent.ends(self._text, self._at, len(self._text))
            given = self._take(extent.length)
            self._give("arguments", given)
            extent.length -= len(given)
            if is_whole or not (yield from self._more()):
                return

    def _rest_of_call(self) -> Steps[None]:
        """Drops the end of the object after its arguments. What does not end it is text."""
        space = yield from self._white()
        if self._next() not in ("}", ","):
            self._give("text", space)
            return
        extent = Extent(depth=1)
        while not extent.ends(self._text, self._at, MAX_HELD):
            if not (yield from self._more()):
                self._give("text", space + self._take(MAX_HELD))
                return
        self._take(extent.length)

    def _named(self, head: str) -> bool:
        """Begins the call if the beginning of an object, up to its first object, has the name before the arguments."""
        members = _object_of(head + "{}}")
        if not members or list(members)[-1] not in _ARGUMENTS or not self._is_tool(members.get("name")):
            return False
        self._give("call", members["name"])
        return True

    def _whole(self, text: str) -> bool:
        members = _object_of(text)
        if members is None or not self._is_tool(members.get("name")):
            return False
        given: Any = next((members[key] for key in _ARGUMENTS if members.get(key) is not None), {})
        arguments = _object_of(given) if isinstance(given, str) else given
        if not isinstance(arguments, dict):
            return False
        try:
            written = json_of(arguments).decode()
        except TypeError:  # a number that is too long
            return False
        self._give("call", members["name"])
        self._give("arguments", written)
        return True

    def _is_tool(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._tools


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Llama3JsonParser(JsonCallParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}``, several separated by ``;``.

    ``<|python_tag|>`` may precede them. Source: Meta's prompt format of Llama 3.1.
    """

    _TAG = Markers.of("<|python_tag|>")
    _BEGINNING = Markers(
        re.compile(_TAG.whole.pattern + r'|\{(?=\s{0,256}")'), re.compile(_TAG.begun.pattern + r"|\{\s{0,256}\Z"), 257
    )
    """Other braces are text at once."""

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(self._BEGINNING)):
            if before == "{":
                before, self._at = "", self._at - 1
            yield from self._json_calls(before)


class MistralParser(JsonCallParser):
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer ``[TOOL_CALLS]name[ARGS]{...}``.

    Between a name and ``[ARGS]`` there may be ``[CALL_ID]`` and an id; ``[ARGS]`` may be left out. Source:
    mistral-common's tokenizers v3 to v13. The markers are special tokens.
    """

    _BEGINNING = Markers.of("[TOOL_CALLS]")
    _NAMED = re.compile(r"\s{0,8}([\w.-]{1,64})\s{0,8}(\[CALL_ID\]\w{0,32})?(\[ARGS\])?\s{0,8}", re.ASCII)
    _LONGEST = 160

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(self._BEGINNING)):
            before += yield from self._white()
            if self._next() == "[":
                yield from self._json_calls(before + self._take(1), "]")
                continue
            head = yield from self._find("{", self._LONGEST)
            named = None if head is None else self._NAMED.fullmatch(head)
            if head is None or named is None or named[1] not in self._tools:
                self._give("text", before)
                continue
            self._take(len(head))
            self._give("call", named[1])
            yield from self._object()


class HermesParser(JsonCallParser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one pair of tags for each call.

    Source: the chat templates of Hermes 2 Pro and Qwen 2.5.
    """

    _BEGINNING = Markers.of("<tool_call>")

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(self._BEGINNING)):
            yield from self._json_calls(before, "</tool_call>")


class GuidedCallsParser(JsonCallParser):
    """``[{"name": ..., "parameters": {...}}]``."""

    def _run(self) -> Steps[None]:
        before = yield from self._white()
        if self._next() == "[":
            yield from self._json_calls(before + self._take(1), "]")
        else:
            self._give("text", before)
        yield from self._everything()


class GuidedArgumentsParser(JsonCallParser):
    """The arguments of the only tool."""

    def _run(self) -> Steps[None]:
        before = yield from self._white()
        if self._next() == "{":
            self._give("call", next(iter(self._tools)))
            yield from self._object()
        else:
            self._give("text", before)
        yield from self._everything()
