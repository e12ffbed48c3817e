"""Reasoning beside the text: between two tags, or in a channel of its own."""

import re

from app.pipelines.openai.tool_calls.parser import Kind, Markers, Parser, Part, Steps

_HEADS = ("<|start|>", "<|channel|>")
_MARKS = Markers.of(*_HEADS, "<|end|>", "<|call|>", "<|return|>")
_MESSAGE = "<|message|>"
_LONGEST_HEAD = 512
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]{1,64})", re.ASCII)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ReasoningParser(Parser):
    def __init__(self, beginning: str, end: str, *, is_inside: bool) -> None:
        """``is_inside``: the prompt already has the beginning."""
        self._beginning = beginning
        self._end = end
        self._is_inside = is_inside
        super().__init__({})

    def _run(self) -> Steps[None]:
        space = yield from self._white()
        if (yield from self._starts(self._beginning)) or self._is_inside:
            yield from self._white()
            yield from self._until(Markers.of("\n" + self._end, self._end), "reasoning")
            yield from self._white()
        else:
            self._give("text", space)
        yield from self._everything()


class ReasoningThenCalls:
    """Gives the text after the reasoning to the parser of the calls."""

    def __init__(self, reasoning: ReasoningParser, calls: Parser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def add(self, text: str) -> list[Part]:
        return self._with_calls(self._reasoning.add(text))

    def finish(self) -> list[Part]:
        return [*self._with_calls(self._reasoning.finish()), *self._calls.finish()]

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        return [each for part in parts for each in (self._calls.add(part.text) if part.kind == "text" else [part])]


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
        if recipient is not None and recipient[1] in self._tools:
            self._give("call", recipient[1])
            return "arguments"
        if recipient is not None:
            self._give("text", head)
        return "reasoning" if channel is not None and channel[1] == "analysis" and recipient is None else "text"
