"""Tool calls in the text of a model: JSON objects, Python's syntax, or tags; the parser for the answer to one request.

Sources: Meta's prompt formats of Llama 3.1 and 3.2, mistral-common's tokenizers v3 to v13, the chat templates of
Hermes 2 Pro, Qwen 2.5 and Qwen3-Coder.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from app.core.json import json_of
from app.llm.answer_parser import MAX_HELD, NOTHING, GptOssParser, Markers, Parser, ReasoningParser, Steps, Tools
from app.llm.answer_schema import dict_in, list_in

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


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser(Parser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one pair of tags for each call."""

    beginning = Markers.of("<tool_call>")
    end = "</tool_call>"

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(self.beginning)):
            if before == "{":
                before, self._at = "", self._at - 1
            yield from self._json_calls(before, self.end)

    def _json_calls(self, before: str, end: str = "") -> Steps[None]:
        """Reads the next calls, and ``end`` after them. Anything else is text, after ``before``.

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
        """Reads the next object. An object that is not a call is returned as text, after ``before``.

        The arguments are given out while they grow if the name comes before them.
        """
        extent, is_tried = Extent(), False
        while True:
            is_whole = extent.ends(self._text, self._at, MAX_HELD)
            if extent.nested and not is_tried:
                is_tried = True
                name, _, is_last = self._call_in(self._next(extent.nested) + "{}}")
                if name and is_last:
                    self._give("call", name)
                    self._take(extent.nested)
                    yield from self._object()
                    yield from self._rest_of_call()
                    return True
            length = min(extent.length, MAX_HELD)
            name, arguments, _ = self._call_in(self._next(length)) if is_whole else ("", "", False)
            if name:
                self._take(length)
                self._give("call", name)
                self._give("arguments", arguments)
                return True
            if is_whole or not (yield from self._more()):
                self._give("text", before + self._take(length))
                return False

    def _call_in(self, text: str) -> tuple[str, str, bool]:
        """The name and the arguments of an object, and whether they end it. The name is empty if it is not a call."""
        try:
            members = _decode_object(text)
            given: Any = next((members[each] for each in _ARGUMENTS if members.get(each) is not None), {})
            arguments = json_of(_decode_object(given) if isinstance(given, str) else given).decode()
        except (ValueError, RecursionError, TypeError):  # TypeError: of a number that is too long
            return "", "", False
        name = members.get("name")
        if not isinstance(name, str) or name not in self._tools or not isinstance(given, dict | str):
            return "", "", False
        return name, arguments, [*members][-1] in _ARGUMENTS

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


class Llama3Parser(JsonCallParser):
    """``{"name": ..., "parameters": {...}}``, several separated by ``;``. Other braces are text at once."""

    beginning = Markers.of("<|python_tag|>", whole=r'\{(?=\s{0,256}")', begun=r"\{\s{0,256}\Z", longest=257)
    end = ""


_NAMED = re.compile(r"\s{0,8}([\w.-]{1,64})\s{0,8}(\[CALL_ID\]\w{0,32})?(\[ARGS\])?\s{0,8}", re.ASCII)
"""Mistral's text before the arguments. ``[ARGS]`` is optional."""
_LONGEST_NAMED = 160


class MistralParser(JsonCallParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, newer ``[TOOL_CALLS]name[ARGS]{...}``. Special tokens."""

    beginning = Markers.of("[TOOL_CALLS]")

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(self.beginning)):
            before += yield from self._white()
            if self._next() == "[":
                yield from self._json_calls(before + self._take(1), "]")
                continue
            head = yield from self._find("{", _LONGEST_NAMED)
            named = None if head is None else _NAMED.fullmatch(head)
            if head is None or named is None or named[1] not in self._tools:
                self._give("text", before)
            else:
                self._take(len(head))
                self._give("call", named[1])
                yield from self._object()


class GuidedParser(JsonCallParser):
    """A list ``[{"name": ..., "parameters": {...}}]``; ``is_named``: the arguments of the only tool."""

    def __init__(self, tools: Tools, *, is_named: bool) -> None:
        self._is_named = is_named
        super().__init__(tools)

    def _run(self) -> Steps[None]:
        before = yield from self._white()
        if self._next() != ("{" if self._is_named else "["):
            self._give("text", before)
        elif self._is_named:
            self._give("call", next(iter(self._tools)))
            yield from self._object()
        else:
            yield from self._json_calls(before + self._take(1), "]")
        yield from self._until(NOTHING)


_NAME = r"\s{0,8}[A-Za-z_][\w.-]{0,63}\s{0,8}"
_LIST = Markers.of(whole=rf"\[(?={_NAME}\()", begun=rf"\[(?:{_NAME}|\s{{0,8}})\Z", longest=81)
_LONGEST_NAME = 96
_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_MAX_DEPTH = 32
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>[A-Za-z_]\w*)\s*=|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<mark>[\[\](){}:,]))""",
    re.ASCII | re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "Null": "null"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class PythonicParser(Parser):
    """Llama 3.2 and 4: ``[f(a=1, b="x"), g()]``, with literals by name. A call is given out when it is complete."""

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_LIST)):
            while (yield from self._call(before)):
                before = yield from self._white()
                found = yield from self._starts(",", "]")
                if found != ",":
                    self._give("text", "" if found else before)
                    break
                before += found

    def _call(self, before: str) -> Steps[bool]:
        """Reads the next call. Text that is not a call is returned, after ``before``."""
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


_TAG, _TAG_END = Markers.of("<tool_call>"), "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_END = Markers.of("\n" + _PARAMETER_END, _PARAMETER_END)


class XmlParser(Parser):
    """Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    A value is text; the schema of the function says which values are not.
    """

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_TAG)):
            before += yield from self._white()
            before += (begun := (yield from self._starts(_FUNCTION)))
            name = (yield from self._find(">", 65)) if begun else None
            if name is None or name not in self._tools:
                self._give("text", before)
                continue
            self._take(len(name) + 1)
            schema = self._tools[name]
            self._give("call", name)
            rest = yield from self._arguments(schema)
            rest += yield from self._white()
            if not (yield from self._starts(_TAG_END)):
                self._give("text", rest)

    def _arguments(self, schema: Mapping[str, Any]) -> Steps[str]:
        """Ends after the function's end, or after text that is not a parameter, which is returned.

        A value that may be another type than a text is held until its end.
        """
        between = "{"
        while True:
            space = yield from self._white()
            found = yield from self._starts(_PARAMETER, _FUNCTION_END)
            key = (yield from self._find(">", 257)) if found == _PARAMETER else None
            if key is None:
                self._give("arguments", "{}" if between == "{" else "}")
                return "" if found == _FUNCTION_END else space + found
            self._take(len(key) + 1)
            self._give("arguments", between + json_of(key).decode() + ":")
            between = ","
            yield from self._starts("\n")
            types = _types_of(schema, key)
            value = (yield from self._find(_PARAMETER_END, MAX_HELD)) if types - {"string"} else None
            if value is not None:
                self._take(len(value) + len(_PARAMETER_END))
                self._give("arguments", _json_value(value.removesuffix("\n"), types))
                continue
            self._give("arguments", '"')
            if not (yield from self._until(_VALUE_END, "arguments", lambda text: json_of(text).decode()[1:-1])):
                return ""
            self._give("arguments", '"')


def _types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a parameter may have; empty if its schema does not say."""
    of_key = dict_in(dict_in(schema.get("properties")).get(key))
    options = [of_key, *list_in(of_key.get("anyOf")), *list_in(of_key.get("oneOf"))]
    types = [dict_in(each).get("type") for each in options]
    return {name for each in types for name in (each if isinstance(each, list) else [each]) if isinstance(name, str)}


def _json_value(text: str, types: set[str]) -> str:
    """A text that is not JSON of one of the types is a string. Python's words for true, false and none are read too."""
    try:
        value = msgspec.json.decode(_WORDS.get(text.strip().capitalize(), text))
        return json_of(text if isinstance(value, str) and "string" in types else value).decode()
    except (ValueError, TypeError, RecursionError):
        return json_of(text).decode()


ToolFormat = Literal["llama3_json", "pythonic", "mistral", "hermes", "qwen3_coder", "gpt_oss"]
ReasoningFormat = Literal["qwen3", "deepseek_r1", "gpt_oss", "none"]
Reasoning = ReasoningFormat | tuple[str, str]
"""A format, or the tags around the reasoning."""

NEED_SPECIAL_TOKENS = frozenset({"mistral", "gpt_oss"})
"""The formats whose markers are special tokens."""
PROMPT_END = 512
"""The characters at the end of a prompt that say whether the answer begins inside the reasoning."""
_PARSERS: Mapping[ToolFormat, Callable[[Tools], Parser]] = {
    "llama3_json": Llama3Parser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "hermes": JsonCallParser,
    "qwen3_coder": XmlParser,
    "gpt_oss": GptOssParser,
}


def parser_of(tool_format: ToolFormat | None, tools: Tools, reasoning: Reasoning | None, prompt: str) -> Parser | None:
    """``tools``: those that may be called. ``prompt``: its end says whether the answer begins inside the reasoning.

    Returns None if the answer is only text.
    """
    if "gpt_oss" in (tool_format, reasoning):
        return GptOssParser(tools)
    calls = _PARSERS[tool_format](tools) if tool_format is not None and tools else None
    if reasoning in (None, "none"):
        return calls
    beginning, end = reasoning if isinstance(reasoning, tuple) else ("<think>", "</think>")
    last = prompt[-PROMPT_END:].rstrip()
    is_inside = last.endswith(beginning) or (reasoning == "deepseek_r1" and not last.endswith(end))
    return ReasoningParser(beginning, end, calls, is_inside=is_inside)


_DEFINITIONS = ("$defs", "definitions")


def calls_schema(tools: Tools, *, is_parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls: ``[{"name": ..., "parameters": {...}}]``.

    References begin at the whole schema, so the definitions of a function move there. Raises ValueError if two
    functions define different types under one name.
    """
    definitions: dict[str, dict[str, Any]] = {}
    options = []
    for name, parameters in tools.items():
        for key in _DEFINITIONS:
            for type_, schema in dict_in(parameters.get(key)).items():
                if definitions.setdefault(key, {}).setdefault(type_, schema) != schema:
                    raise ValueError("define different types under one name")
        own = {"type": "object"} | {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
        options.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": own},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": options}, **definitions}
    return calls if is_parallel else {**calls, "maxItems": 1}
