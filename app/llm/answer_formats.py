"""How models write tool calls and reasoning: the parser for the answer to one request, and the schema of guided calls.

Reasoning is between two tags, or in a channel of its own.
"""

import re
from typing import Any, Literal

from app.llm.answer_parser import NOTHING, Kind, Markers, Parser, Part, Steps, Tools
from app.llm.tool_calls import JSON_FORMS, JsonCallParser, PythonicParser, XmlParser

ToolFormat = Literal["llama3_json", "pythonic", "mistral", "hermes", "qwen3_coder", "gpt_oss"]
ReasoningFormat = Literal["qwen3", "deepseek_r1", "gpt_oss", "none"]
Reasoning = ReasoningFormat | tuple[str, str]
"""A format, or the tags around the reasoning."""

NEED_SPECIAL_TOKENS = frozenset({"mistral", "gpt_oss"})
"""The formats whose markers are special tokens."""
_THINK = ("<think>", "</think>")
PROMPT_END = 512
"""The characters at the end of a prompt that say whether the answer begins inside the reasoning."""

_HEADS = ("<|start|>", "<|channel|>")
_MARKS = Markers.of(*_HEADS, "<|end|>", "<|call|>", "<|return|>")
_MESSAGE = "<|message|>"
_LONGEST_HEAD = 512
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]{1,64})", re.ASCII)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_DEFINITIONS = ("$defs", "definitions")


def parser_of(tool_format: ToolFormat | None, tools: Tools, reasoning: Reasoning | None, prompt: str) -> Parser | None:
    """``tools``: those that may be called. ``prompt``: its end says whether the answer begins inside the reasoning.

    Returns None if the answer is only text.
    """
    if "gpt_oss" in (tool_format, reasoning):
        return GptOssParser(tools)
    calls: Parser | None = None
    if tool_format in JSON_FORMS and tools:
        calls = JsonCallParser(tools, JSON_FORMS[tool_format])
    elif tool_format is not None and tools:
        calls = PythonicParser(tools) if tool_format == "pythonic" else XmlParser(tools)
    if reasoning in (None, "none"):
        return calls
    beginning, end = reasoning if isinstance(reasoning, tuple) else _THINK
    last = prompt[-PROMPT_END:].rstrip()
    is_inside = last.endswith(beginning) or (reasoning == "deepseek_r1" and not last.endswith(end))
    return ReasoningParser(beginning, end, calls, is_inside=is_inside)


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
            if marker in _HEADS:
                head = yield from self._find(_MESSAGE, _LONGEST_HEAD)
                if head is None:
                    self._give("text", marker)
                else:
                    kind = self._begun(marker + self._take(len(head) + len(_MESSAGE)))

    def _begun(self, head: str) -> Kind:
        """Returns the kind of the message after this head. A call of an unknown function is text, with its head."""
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient is None:
            return "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        if recipient[1] not in self._tools:
            self._give("text", head)
            return "text"
        self._give("call", recipient[1])
        return "arguments"


def calls_schema(tools: Tools, *, is_parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls: ``[{"name": ..., "parameters": {...}}]``.

    References begin at the whole schema, so the definitions of a function move there. Raises ValueError if two
    functions define different types under one name.
    """
    definitions: dict[str, dict[str, Any]] = {}
    options = []
    for name, parameters in tools.items():
        for key in _DEFINITIONS:
            given = parameters.get(key)
            for type_, schema in given.items() if isinstance(given, dict) else ():
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
