"""One choice of an answer: what a model wrote, up to a stop text, as text, reasoning and calls."""

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from app.api.openai.logprobs import Alternatives, alternatives_of
from app.api.openai.openai_errors import openai_names
from app.api.openai.tools import NO_TOOLS, ToolUse
from app.core.answer import Tokens, Values
from app.core.errors import FormatMismatch, GatewayError, ToolCallMissing
from app.core.inference import InferenceRequest, InferenceResponse
from app.core.text import shown
from app.llm.answer_parser import Parser, Part, begun_at
from app.llm.answer_schema import MAX_ANSWER_CHARACTERS, TOO_LARGE, AnswerSchema
from app.llm.tokenizer import COUNTED_AT_ONCE, TokenCounter
from app.pipelines.openai_mapping import TextForm
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector

AT_ONCE = 4096
"""Characters that are read at once. This takes at most about 5 ms."""
MAX_CHECKED_CHARACTERS = 1024 * 1024
"""Limit of the arguments that are kept to check them."""
_LONG_TEXT = 64 * 1024
"""Characters of an answer whose check takes long."""


@dataclass(slots=True)
class TextOptions:
    """What an answer depends on besides the responses of the model."""

    stream: bool = False
    include_usage: bool = False
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    """Whether the text ends with the stop text."""
    choices: int = 1
    logprobs: int | None = None
    """The number of alternatives for a token; None for no log probabilities."""
    echo: bool = False
    counter: TokenCounter | None = None
    """Counts the tokens, if usage is wanted and the model does not count them."""
    reasoning_counter: TokenCounter | None = None
    """Counts the tokens of the reasoning, which no model does."""
    prompt: str = ""
    """The text to echo."""
    prompt_tokens: int | None = None
    """If the gateway counts them."""
    parser: Callable[[], Parser | None] = lambda: None
    """Makes what finds the calls and the reasoning in a text; None if it is only text."""
    tools: ToolUse = NO_TOOLS
    schema: AnswerSchema | None = None
    """Checks the answer."""

    def count_prompt(self, text: str) -> None:
        if self.counter is not None:
            self.prompt_tokens = self.counter(text, add_special_tokens=True)


class CallPiece(Struct):
    """A part of a call. ``id`` and ``name``: empty after the first part."""

    index: int
    id: str = ""
    name: str = ""
    arguments: list[str] = []


class Piece(Struct):
    """What a choice has written since its last piece. ``offset``: the number of characters before it."""

    offset: int = 0
    texts: list[str] = []
    tokens: list[Alternatives] | None = None
    """As the model describes them."""
    reasoning: list[str] = []
    calls: list[CallPiece] = []
    finish_reason: str | None = None
    is_read: bool = False
    """Whether an :class:`AnswerReader` reads the texts, so that there can be calls or reasoning instead."""

    def __bool__(self) -> bool:
        return bool(self.texts or self.tokens or self.finish_reason or self.reasoning or self.calls)


class AnswerReader:
    """Reads the text of one choice, which has calls or reasoning."""

    def __init__(self, parser: Parser, tools: ToolUse) -> None:
        self._parser = parser
        self._tools = tools
        self._unread = deque[str]()
        self._count = 0
        self._arguments: list[list[str]] = []
        """Of each call, if they are checked."""
        self._checked_characters = 0

    @property
    def ends_with_calls(self) -> bool:
        """Whether the finish reason is ``tool_calls``. After a call that the request names, OpenAI's is ``stop``."""
        return self._count > 0 and not self._tools.is_named

    @property
    def is_behind(self) -> bool:
        """Whether there is text that was not read yet. A further :meth:`add` reads on."""
        return bool(self._unread)

    def add(self, text: str, piece: Piece) -> None:
        """Reads the text, or as much as can be read at once."""
        self._unread.extend(text[start : start + AT_ONCE] for start in range(0, len(text), AT_ONCE))
        left = AT_ONCE
        while self._unread and len(self._unread[0]) <= left:
            left -= len(self._unread[0])
            self._write(self._parser.add(self._unread.popleft()), piece)

    def finish(self, piece: Piece) -> None:
        """Call it when the reader is not behind."""
        self._write(self._parser.finish(), piece)

    def check(self, finish_reason: str) -> None:
        """Raises ToolCallMissing if a call is required, and there is none or one that is complete but wrong."""
        if not self._tools.is_required:
            return
        if not self._count:
            raise ToolCallMissing("The model did not call a function, which tool_choice requires.")
        if self._checked_characters > MAX_CHECKED_CHARACTERS:
            raise ToolCallMissing("The model called a function with arguments that are too large to be checked.")
        if finish_reason != "length":
            try:
                for arguments in self._arguments:
                    msgspec.json.decode("".join(arguments), type=dict[str, msgspec.Raw])
            except (ValueError, RecursionError):
                text = "The model called a function with arguments that are not a JSON object."
                raise ToolCallMissing(text) from None

    def _write(self, parts: Sequence[Part], piece: Piece) -> None:
        """Calls after the first are left out if the request does not allow them."""
        for part in parts:
            if part.kind == "text":
                piece.texts.append(part.text)
            elif part.kind == "reasoning":
                piece.reasoning.append(part.text)
            elif part.kind == "call":
                self._count += 1
                self._arguments.append([])
                if self._count == 1 or self._tools.is_parallel:
                    id_ = secrets.token_hex(5)[:9] if self._tools.has_short_ids else f"call_{secrets.token_hex(12)}"
                    piece.calls.append(CallPiece(self._count - 1, id_, part.text))
            else:
                if self._tools.is_required:
                    self._checked_characters += len(part.text)
                    if self._checked_characters <= MAX_CHECKED_CHARACTERS:
                        self._arguments[-1].append(part.text)
                if self._count == 1 or self._tools.is_parallel:
                    if not piece.calls:
                        piece.calls.append(CallPiece(self._count - 1))
                    piece.calls[-1].arguments.append(part.text)


class StopMatcher:
    """Ends a text before the caller's first stop text, or after it, for any division of the text into pieces.

    If several stop texts end at the same place, the longest one counts. Keeps text that may be the beginning of a stop
    text.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held = ""
        self.has_stopped = False

    def add(self, piece: str) -> str:
        """Returns the text that cannot be part of a stop text; empty after a stop text."""
        if self.has_stopped:
            return ""
        text = self._held + piece
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if found:
            self.has_stopped, self._held = True, ""
            end, start = min(found)
            return text[: end if self._keeps_stop else start]
        certain = begun_at(text, 0, self._stops)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Returns the kept text after the last piece."""
        held, self._held = self._held, ""
        return held


class Choice:
    """Collects the responses of one request: :meth:`add` and :meth:`finish` write to ``piece``.

    The pipeline's own collector checks the contract and detects early exits, which become an empty text here.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        form: TextForm,
        request: InferenceRequest,
        options: TextOptions,
        name_by_field: Mapping[str, str],
    ) -> None:
        self._form = form
        self._options = options
        self._names = name_by_field
        self._collector = Collector(pipeline, request, is_divided=False)
        self._matcher = StopMatcher(options.stops, keeps_stop=options.keeps_stop) if options.stops else None
        parser = options.parser()
        self._reader = None if parser is None else AnswerReader(parser, options.tools)
        self._tokens_field = form.logprobs.output if form.logprobs and options.logprobs is not None else None
        self._echo = options.prompt
        self._counted = None if options.prompt_tokens is None else Tokens(options.prompt_tokens)
        """The tokens that the gateway counts; None if the model counts them, or nothing does."""
        self._written: list[str] = []
        """All text, for the tokenizer."""
        self._reasoning: list[str] = []
        """All reasoning, for the same."""
        self._checked: list[str] = []
        """The text for the caller, if its format is checked."""
        self._length = 0
        """Of the text that the caller got, and ``_read_length`` of the model's."""
        self._read_length = 0
        self.piece = Piece(is_read=self._reader is not None)
        self.has_stopped = False
        """Whether a stop text was found."""
        self.finish_reason = "stop"
        self.early_exit: str | None = None
        self.reasoning_tokens: int | None = None
        """Known at the end, if a tokenizer counts them."""

    @property
    def is_behind(self) -> bool:
        return self._reader is not None and self._reader.is_behind

    def catch_up(self) -> None:
        self._show("")

    @property
    def ends_slowly(self) -> bool:
        options = self._options
        counts = options.counter is not None or options.reasoning_counter is not None
        checks = options.schema is not None and (options.schema.has_rules or self._read_length > _LONG_TEXT)
        return checks or (counts and self._read_length > COUNTED_AT_ONCE)

    @property
    def tokens(self) -> Tokens | None:
        return self._collector.tokens or self._counted

    def take(self) -> Piece:
        """Returns what was written since the last call."""
        piece = self.piece
        self._length += sum(map(len, piece.texts))
        self.piece = Piece(self._length, is_read=self._reader is not None)
        if self._options.schema is not None and self._length <= MAX_ANSWER_CHARACTERS:
            self._checked += piece.texts
        if self._options.reasoning_counter is not None:
            self._reasoning += piece.reasoning
        return piece

    def add(self, response: InferenceResponse) -> None:
        """Raises the errors of :meth:`Collector.add`."""
        if self.has_stopped:
            self._collector.count(response)
        elif (values := self._collector.add(response)) is not None:
            self._write(values)

    def finish(self, error: GatewayError | None = None) -> Sequence[Piece]:
        """Returns the rest. The last piece of a stream has only the finish reason.

        Raises ToolCallMissing, FormatMismatch, or the errors of :meth:`Collector.finish`.
        """
        if not self.has_stopped:
            with openai_names(self._names):
                ending = self._collector.finish(error)
            self.early_exit = ending.early_exit
            for values in ending.outputs:
                self._write(values)
            self._show("" if self._matcher is None else self._matcher.rest())
        if self._reader is not None:
            self._reader.finish(self.piece)
            if self.early_exit is None:
                self._reader.check(self.finish_reason)
            if self._reader.ends_with_calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        rest, options = self.take(), self._options
        if options.schema is not None and self.early_exit is None and self.finish_reason == "stop":
            # An answer with a call, or that the model did not end, may have any format.
            is_whole = self._length <= MAX_ANSWER_CHARACTERS
            problem = options.schema.problem_of("".join(self._checked)) if is_whole else TOO_LARGE
            if problem is not None:
                raise FormatMismatch(f"The model's answer {shown(problem, 256)}.")
        if self._counted is not None and options.counter is not None:
            self._counted.completion = options.counter("".join(self._written))
        if options.reasoning_counter is not None:
            self.reasoning_tokens = options.reasoning_counter("".join(self._reasoning))
        if not options.stream:
            rest.finish_reason = self.finish_reason
            return [rest]
        end = Piece(self._length, finish_reason=self.finish_reason)
        return [rest, end] if rest else [end]

    def _write(self, values: Values) -> None:
        """Writes the values of one response."""
        reason, text = self._form.finish_reason, values[self._form.text] or ""
        if reason is not None and values[reason]:
            self.finish_reason = "length" if values[reason] == "length" else "stop"
        self._read_length += len(text)
        if self._counted is not None:
            self._written.append(text)
        if (name := self._tokens_field) is not None and (tokens := alternatives_of(values[name], name)) is not None:
            self.piece.tokens = self.piece.tokens or []
            self.piece.tokens += tokens
        if self._matcher is not None:
            text = self._matcher.add(text)
            if self._matcher.has_stopped:
                self.has_stopped, self.finish_reason = True, "stop"
        self._show(text)

    def _show(self, text: str) -> None:
        """Writes text for the caller."""
        if self._reader is not None:
            self._reader.add(text, self.piece)
        elif text or self._echo:
            self.piece.texts.append(self._echo + text)
            self._echo = ""
