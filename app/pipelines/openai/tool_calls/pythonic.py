"""Llama 3.2 and 4: a list of calls in Python's syntax, ``[f(a=1), g(b="x")]``.

The arguments are literals by name. A call is given out when it is complete. Source: Meta's prompt format of Llama 3.2.
"""

import re

import msgspec

from app.core.json import json_of
from app.pipelines.openai.tool_calls.json_calls import Extent
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Markers, Parser, Steps

_NAME = r"\s{0,8}[A-Za-z_][\w.-]{0,63}\s{0,8}"
_BEGINNING = Markers(re.compile(rf"\[(?={_NAME}\()", re.ASCII), re.compile(rf"\[(?:{_NAME}|\s{{0,8}})\Z", re.ASCII), 81)
_LONGEST_NAME = 96
_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_MAX_DEPTH = 32
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>[A-Za-z_]\w*)\s*=|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<mark>[\[\](){}:,]))""",
    re.ASCII | re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class PythonicParser(Parser):
    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_BEGINNING)):
            while (yield from self._call(before)):
                before = yield from self._white()
                found = yield from self._starts(",", "]")
                if found != ",":
                    self._give("text", "" if found else before)
                    break
                before += found

    def _call(self, before: str) -> Steps[bool]:
        """Reads the call that comes next. Text that is no call is given out, after ``before``."""
        name = yield from self._find("(", _LONGEST_NAME)
        if name is None or name.strip() not in self._tools:
            self._give("text", before)
            return False
        extent = Extent(outside=_OUTSIDE)
        while not extent.ends(self._text, self._at, MAX_HELD) and (yield from self._more()):
            pass
        call = self._take(min(extent.length, MAX_HELD))
        try:
            arguments = _json_of_arguments(call[len(name) + 1 :])
        except (ValueError, TypeError, IndexError, OverflowError):
            self._give("text", before + call)
            return False
        self._give("call", name.strip())
        self._give("arguments", arguments)
        return True


def _json_of_arguments(text: str) -> str:
    """Returns ``a=1, b="x")`` as a JSON object.

    Each token becomes one of JSON, whose decoder finds what does not fit. Raises ValueError, TypeError, IndexError or
    OverflowError for other text.
    """
    tokens, names, depth, place = ["{"], set[str](), 1, 0
    while depth:
        found = _TOKEN.match(text, place)
        if found is None or depth > _MAX_DEPTH:
            raise ValueError(text)
        kind, token, place = found.lastgroup, found[found.lastgroup or 0], found.end()
        if kind == "name":
            if token in names or depth > 1:
                raise ValueError(token)
            names.add(token)
            token = f'"{token}":'
        elif kind == "number":
            token = json_of(float(token) if set(token) & set(".eE") else int(token)).decode()
        elif kind == "text":
            token = json_of(_ESCAPE.sub(_unescaped, token[1:-1])).decode()
        elif kind == "word":
            token = _WORDS.get(token, token)
        elif token in "[({":
            depth, token = depth + 1, token.replace("(", "[")
        elif token in "])}":
            depth, token = depth - 1, token.replace(")", "]" if depth > 1 else "}")
            if tokens[-1] == "," and tokens[-2][-1] not in "[{":
                tokens.pop()
        elif token == ":" and depth == 1:
            raise ValueError(text)
        tokens.append(token)
    if place < len(text):
        raise ValueError(text)
    return json_of(msgspec.json.decode("".join(tokens))).decode()


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[4], found[4])
