"""One choice of an answer: its text up to a stop text, its finish reason, its tokens and their count."""

from collections.abc import Sequence
from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from app.api.openai.choice_parts import Piece, joined
from app.api.openai.logprobs import Alternatives, alternatives_of
from app.api.openai.openai_errors import openai_names
from app.api.openai.requests import Prompt, ResponseOptions
from app.api.openai.response_format import FormatCheck
from app.core.answer import Tokens, Values
from app.core.errors import GatewayError
from app.core.inference import InferenceRequest, InferenceResponse
from app.llm.answer_parser import begun_at
from app.llm.tokenizer import COUNTED_AT_ONCE
from app.pipelines.openai_mapping import TextForm
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector

Count = Annotated[int, Meta(ge=0)]


class OpenAIReasoning(TypedDict):
    reasoning_tokens: Count


class OpenAIUsage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    completion_tokens_details: NotRequired[OpenAIReasoning]


def tokens_of(choices: "Sequence[Choice]") -> Tokens | None:
    """The tokens of all choices. The prompt counts once. None if nothing counts them."""
    counts = [choice.tokens for choice in choices if choice.tokens is not None]
    if not counts:
        return None
    prompt = next((count.prompt for count in counts if count.prompt is not None), None)
    reasoning = [choice.reasoning_tokens for choice in choices if choice.reasoning_tokens is not None]
    return Tokens(prompt, sum(count.completion for count in counts), sum(reasoning) if reasoning else None)


def usage_of(tokens: Tokens | None) -> OpenAIUsage | None:
    """Returns None if the number of the prompt's tokens is not known."""
    if tokens is None or tokens.prompt is None:
        return None
    prompt, completion = tokens.prompt, tokens.completion
    usage: OpenAIUsage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if tokens.reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": min(tokens.reasoning, completion)}
    return usage


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
        if not self._stops or self.has_stopped:
            return "" if self.has_stopped else piece
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
    """Collects the responses of one request.

    The pipeline's own collector checks the contract and detects early exits, which become an empty text here.
    """

    def __init__(
        self, pipeline: Pipeline, form: TextForm, request: InferenceRequest, options: ResponseOptions, prompt: Prompt
    ) -> None:
        self._form = form
        self._names = {prompt.name: form.prompt, **prompt.field_by_name, **form.field_by_parameter}
        self._tokens_field = form.logprobs.output if form.logprobs and options.logprobs is not None else None
        self._collector = Collector(pipeline, request, is_divided=False)
        self._matcher = StopMatcher(options.stops, keeps_stop=options.keeps_stop)
        self._reader = None if prompt.reader is None else prompt.reader()
        self._format = None if prompt.schema is None else FormatCheck(prompt.schema)
        self._echo = prompt.text if options.echo else ""
        self._length = 0
        self._finish_reason = "stop"
        self._counted = None if prompt.tokens is None else Tokens(prompt.tokens)
        """The tokens that ``prompt.counter`` counts; None if the model counts them, or nothing does."""
        self._counter = prompt.counter
        self._reasoning_counter = prompt.reasoning_counter
        self._reasoning: list[str] = []
        """The reasoning for the tokenizer."""
        self.reasoning_tokens: int | None = None
        """Known at the end, if a tokenizer counts them."""
        self._texts: list[str] = []
        """The text for the tokenizer."""
        self._late: list[Piece] = []
        """What the reader read after the responses."""
        self.early_exit: str | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._matcher.has_stopped

    @property
    def is_behind(self) -> bool:
        return self._reader is not None and self._reader.is_behind

    def catch_up(self) -> None:
        self._late.append(self._noted(self._piece("")))

    @property
    def ends_slowly(self) -> bool:
        counted = sum(map(len, (*self._texts, *self._reasoning)))
        return counted > COUNTED_AT_ONCE or (self._format is not None and self._format.is_slow)

    @property
    def tokens(self) -> Tokens | None:
        return self._collector.tokens or self._counted

    def add(self, response: InferenceResponse) -> Piece:
        """Raises the errors of :meth:`Collector.add`."""
        if self.has_stopped:
            self._collector.count(response)
            return Piece()
        values = self._collector.add(response)
        return Piece() if values is None else self._noted(self._piece_of(values))

    def finish(self, error: GatewayError | None = None) -> tuple[Piece, Piece]:
        """Returns the rest of the text, and the end.

        Raises ToolCallMissing, FormatMismatch, or the errors of :meth:`Collector.finish`.
        """
        rest = self._piece("") if self.has_stopped else self._rest(error)
        if self._reader is not None:
            rest = joined([rest, self._reader.finish()])
            if self.early_exit is None:
                self._reader.check(self._finish_reason)
            if self._reader.ends_with_calls and self._finish_reason == "stop":
                self._finish_reason = "tool_calls"
        self._noted(rest)
        if self._format is not None and self.early_exit is None and self._finish_reason == "stop":
            self._format.finish()  # an answer with a call, or that the model did not end, may have any format
        rest = joined([*self._late, rest])
        if self._counted is not None and self._counter is not None:
            self._counted.completion = self._counter("".join(self._texts))
        if self._reasoning_counter is not None:
            self.reasoning_tokens = self._reasoning_counter("".join(self._reasoning))
        return rest, Piece(finish_reason=self._finish_reason, offset=self._length)

    def _noted(self, piece: Piece) -> Piece:
        if self._reasoning_counter is not None:
            self._reasoning.append(piece.reasoning)
        if self._format is not None:
            self._format.add(piece.text)
        return piece

    def _rest(self, error: GatewayError | None) -> Piece:
        with openai_names(self._names):
            ending = self._collector.finish(error)
        self.early_exit = ending.early_exit
        pieces = [self._piece_of(values) for values in ending.outputs]
        return joined([*pieces, self._piece(self._matcher.rest())])

    def _piece_of(self, values: Values) -> Piece:
        if self._form.finish_reason is not None and values[self._form.finish_reason]:
            self._finish_reason = "length" if values[self._form.finish_reason] == "length" else "stop"
        name, text = self._tokens_field, values[self._form.text] or ""
        tokens = None if name is None else alternatives_of(values[name], name)
        if self._counted is not None:
            self._texts.append(text)
        piece = self._piece(self._matcher.add(text), tokens)
        if self.has_stopped:
            self._finish_reason = "stop"
        return piece

    def _piece(self, text: str, tokens: Sequence[Alternatives] | None = None) -> Piece:
        if self._reader is not None:
            return self._reader.add(text, tokens)
        text, self._echo = self._echo + text, ""
        piece = Piece(text, tokens, offset=self._length)
        self._length += len(text)
        return piece
