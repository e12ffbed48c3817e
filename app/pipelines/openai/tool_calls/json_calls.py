"""Calls that are JSON objects: ``{"name": ..., "arguments": {...}}``, also with ``parameters``."""

import re
from typing import Any

import msgspec

from app.core.json import json_of
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Parser, Steps

_ARGUMENTS = ("arguments", "parameters")
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
"""The characters that count outside and inside a string."""


class Extent:
    """Finds the end of a JSON object or array while its text grows. Only brackets and strings count."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self.position = 0
        """All before it was read."""
        self.nested = 0
        """The place of the first object in the outer object."""

    def ends(self, text: str) -> bool:
        """Reads on; returns whether the value ends at ``position``."""
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, self.position):
            self.position = found.end()
            match found.group():
                case "\\":
                    self.position += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" as bracket:
                    self._depth += 1
                    if bracket == "{" and self._depth == 2 and not self.nested:
                        self.nested = found.start()
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return True
        self.position = max(self.position, len(text))
        return False


class JsonCallParser(Parser):
    def _json_call(self, before: str = "") -> Steps[bool]:
        """Reads the object that comes next. One that is no call is given out as text, after ``before``.

        The arguments are given out while they grow if the name comes before them.
        """
        extent, is_tried = Extent(), False
        while True:
            is_whole = extent.ends(self._text)
            if not is_tried and 0 < extent.nested < MAX_HELD:
                is_tried = True
                if self._named(self._text[: extent.nested]):
                    self._take(extent.nested)
                    yield from self._object()
                    yield from self._rest_of_call()
                    return True
            if is_whole and extent.position <= MAX_HELD and self._whole(self._text[: extent.position]):
                self._take(extent.position)
                return True
            if is_whole or not (yield from self._more()):
                self._as_text(before, min(extent.position, MAX_HELD))
                return False

    def _json_calls(self, before: str) -> Steps[None]:
        """Reads a list of calls, whose bracket was taken in ``before``."""
        while True:
            before += yield from self._white()
            if not self._text.startswith("{"):
                self._give("text", before)
                return
            if not (yield from self._json_call(before)):
                return
            before = yield from self._white()
            found = yield from self._starts(",", "]")
            if found != ",":
                self._give("text", "" if found else before)
                return
            before += found

    def _object(self) -> Steps[None]:
        """Gives out the object that comes next as arguments."""
        extent = Extent()
        while True:
            is_whole = extent.ends(self._text)
            length = min(extent.position, len(self._text))
            self._give("arguments", self._take(length))
            extent.position -= length
            if is_whole or not (yield from self._more()):
                return

    def _rest_of_call(self) -> Steps[None]:
        """Drops the end of the object after its arguments. What does not end it is text."""
        space = yield from self._white()
        if not self._text.startswith(("}", ",")):
            self._give("text", space)
            return
        extent = Extent(depth=1)
        while not extent.ends(self._text):
            if not (yield from self._more()):
                self._as_text(space)
                return
        if extent.position <= MAX_HELD:
            self._take(extent.position)
        else:
            self._as_text(space)

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
