"""The parser for the answer to one request."""

from typing import Literal, Protocol

from app.pipelines.openai.tool_calls.json_calls import (
    GuidedArgumentsParser,
    GuidedCallsParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
)
from app.pipelines.openai.tool_calls.parser import Parser, Part, Tools
from app.pipelines.openai.tool_calls.pythonic import PythonicParser
from app.pipelines.openai.tool_calls.qwen3_coder import Qwen3CoderParser
from app.pipelines.openai.tool_calls.reasoning import GptOssParser, ReasoningParser, ReasoningThenCalls

ToolFormat = Literal["llama3_json", "pythonic", "mistral", "hermes", "qwen3_coder", "gpt_oss"]
ReasoningFormat = Literal["qwen3", "deepseek_r1", "gpt_oss", "none"]
Reasoning = ReasoningFormat | tuple[str, str]
"""A format, or the tags around the reasoning."""

NEED_SPECIAL_TOKENS = frozenset({"mistral", "gpt_oss"})
"""The formats whose markers are special tokens."""

PARSER_OF: dict[ToolFormat, type[Parser]] = {
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "gpt_oss": GptOssParser,
}
_THINK = ("<think>", "</think>")
PROMPT_END = 512
"""The characters at the end of a prompt that say whether the answer begins inside the reasoning."""


class AnswerParser(Protocol):
    def add(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


def parser_of(
    tool_format: ToolFormat | None, tools: Tools, reasoning: Reasoning | None, prompt: str
) -> AnswerParser | None:
    """``tools``: those that may be called. ``prompt``: its end says whether the answer begins inside the reasoning.

    Returns None if the answer is only text.
    """
    if "gpt_oss" in (tool_format, reasoning):
        return GptOssParser(tools)
    calls = PARSER_OF[tool_format](tools) if tool_format is not None and tools else None
    if reasoning in (None, "none"):
        return calls
    beginning, end = reasoning if isinstance(reasoning, tuple) else _THINK
    last = prompt[-PROMPT_END:].rstrip()
    is_inside = last.endswith(beginning) or (reasoning == "deepseek_r1" and not last.endswith(end))
    parser = ReasoningParser(beginning, end, is_inside=is_inside)
    return parser if calls is None else ReasoningThenCalls(parser, calls)


def guided_parser_of(tools: Tools, *, is_named: bool) -> AnswerParser:
    """``is_named``: the answer is the arguments of the only tool. Otherwise it is a list of calls."""
    return GuidedArgumentsParser(tools) if is_named else GuidedCallsParser(tools)
