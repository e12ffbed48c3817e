"""Llama 3.2 and 4: a list of calls in Python's syntax, ``[f(a=1), g(b="x")]``.

The arguments are literals by name. A call is given out when it is complete. Source: Meta's prompt format of Llama 3.2.
"""

import re
from typing import Any

from app.core.json import json_of
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Parser, Steps

_NAME = re.compile(r"\s{0,8}([A-Za-z_][\w.-]{0,63})\s{0,8}\(", re.ASCII)
_MAY_BE_NAME = re.compile(r"\s{0,8}([A-Za-z_][\w.-]{0,63}\s{0,8})?", re.ASCII)
_LONGEST_NAME = 96
_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_MAX_DEPTH = 32
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_]\w*)|(?P<mark>[\[\](){}:,=]))""",
    re.ASCII | re.DOTALL,
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class PythonicParser(Parser):
    def _run(self) -> Steps[None]:
        while before := (yield from self._until("[")):
            while (yield from self._call(before)):
                before = yield from self._white()
                found = yield from self._starts(",", "]")
                if found != ",":
                    self._give("text", "" if found else before)
                    break
                before += found

    def _call(self, before: str) -> Steps[bool]:
        """Reads the call that comes next. Text that is no call is given out, after ``before``."""
        found = yield from self._head(_NAME, _LONGEST_NAME, _MAY_BE_NAME.fullmatch)
        if found is None or found[1] not in self._tools:
            self._give("text", before)
            return False
        end = yield from self._end_of_call(found.end())
        try:
            arguments = json_of(_Literals(self._text[found.end() : end]).arguments()).decode()
        except (ValueError, TypeError, IndexError, OverflowError):
            self._as_text(before, end)
            return False
        self._take(end)
        self._give("call", found[1])
        self._give("arguments", arguments)
        return True

    def _end_of_call(self, position: int) -> Steps[int]:
        """The place after the parenthesis that ends the call, or the length of what is held."""
        depth, quote = 1, ""
        while True:
            pattern = re.compile(rf"[{quote}\\]") if quote else _OUTSIDE
            found = pattern.search(self._text, position, MAX_HELD)
            if found is None:
                position = max(position, min(len(self._text), MAX_HELD))
                if not (yield from self._more()):
                    return min(position, len(self._text))
                continue
            mark, position = found.group(), found.end()
            if mark == "\\":
                position += 1
            elif quote or mark in "\"'":
                quote = "" if quote else mark
            else:
                depth += 1 if mark in "([{" else -1
                if depth == 0:
                    return position


class _Literals:
    """Reads the arguments of a call. Every method raises ValueError, IndexError or OverflowError for other text."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while found := _TOKEN.match(text, position):
            assert found.lastgroup is not None
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()
        if position < len(text):
            raise ValueError(text)
        self._tokens.reverse()

    def arguments(self) -> dict[str, Any]:
        """``a=1, b="x")``."""
        arguments: dict[str, Any] = {}
        while not self._takes(")"):
            kind, name = self._tokens.pop()
            if kind != "word" or name in arguments or not self._takes("="):
                raise ValueError(name)
            arguments[name] = self._value(0)
            self._separated(")")
        if self._tokens:
            raise ValueError(self._tokens)
        return arguments

    def _value(self, depth: int) -> Any:
        kind, text = self._tokens.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(depth)
        match kind, text:
            case "number", _:
                return float(text) if set(text) & set(".eE") else int(text)
            case "text", _:
                return _unescaped(text[1:-1])
            case "word", _ if text in _WORDS:
                return _WORDS[text]
            case "mark", "[" | "(":
                return self._list("]" if text == "[" else ")", depth)
            case "mark", "{":
                return self._dict(depth)
        raise ValueError(text)

    def _list(self, end: str, depth: int) -> list[Any]:
        values = []
        while not self._takes(end):
            values.append(self._value(depth + 1))
            self._separated(end)
        return values

    def _dict(self, depth: int) -> dict[str, Any]:
        values = {}
        while not self._takes("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str) or not self._takes(":"):
                raise ValueError(key)
            values[key] = self._value(depth + 1)
            self._separated("}")
        return values

    def _takes(self, mark: str) -> bool:
        is_next = self._tokens[-1] == ("mark", mark)
        if is_next:
            self._tokens.pop()
        return is_next

    def _separated(self, end: str) -> None:
        if self._tokens[-1] != ("mark", end) and not self._takes(","):
            raise ValueError(end)


def _unescaped(text: str) -> str:
    def character(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return chr(int(code, 16)) if code else _ESCAPED.get(found[4], found[4])

    return _ESCAPE.sub(character, text)
