"""The answers to completions and chat completions, whole or in chunks. Source: the types of OpenAI's Python client."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from msgspec import Meta
from sse_starlette import ServerSentEvent

from app.api.openai.choices import Choice, Piece, TextOptions
from app.api.openai.logprobs import chat_logprobs, completion_logprobs
from app.api.streaming import StreamResponse
from app.core.answer import Answer, Ending, Tokens, Values
from app.core.errors import GatewayError
from app.core.inference import InferenceResponse
from app.streams.events import Event

FinishReason = Literal["stop", "length", "tool_calls"]
Count = Annotated[int, Meta(ge=0)]


class OpenAIReasoning(TypedDict):
    reasoning_tokens: Count


class OpenAIUsage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    completion_tokens_details: NotRequired[OpenAIReasoning]


class OpenAIFunction(TypedDict):
    name: str
    arguments: str


class OpenAIFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class OpenAICall(TypedDict):
    id: str
    type: Literal["function"]
    function: OpenAIFunction


class OpenAICallDelta(TypedDict):
    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: OpenAIFunctionDelta


class _Further(TypedDict, total=False):
    tool_calls: list[OpenAICall]
    reasoning: str
    reasoning_content: str


class OpenAIMessage(_Further):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class OpenAIDelta(TypedDict, total=False):
    """The members of a message that a chunk has."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[OpenAICallDelta]
    reasoning: str
    reasoning_content: str


class _Choice(TypedDict):
    index: Count
    logprobs: dict[str, Any] | None


class OpenAITextChoice(_Choice):
    text: str
    finish_reason: Literal["stop", "length"]


class OpenAITextChunkChoice(_Choice):
    text: str
    finish_reason: Literal["stop", "length"] | None


class OpenAIChatChoice(_Choice):
    message: OpenAIMessage
    finish_reason: FinishReason


class OpenAIChunkChoice(_Choice):
    delta: OpenAIDelta
    finish_reason: FinishReason | None


class _Answer(TypedDict):
    id: str
    created: Count
    model: str


class OpenAICompletion(_Answer):
    object: Literal["text_completion"]
    choices: list[OpenAITextChoice]
    usage: NotRequired[OpenAIUsage]


class OpenAICompletionChunk(_Answer):
    object: Literal["text_completion"]
    choices: list[OpenAITextChunkChoice]
    usage: NotRequired[OpenAIUsage | None]


class OpenAIChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[OpenAIChatChoice]
    usage: NotRequired[OpenAIUsage]


class OpenAIChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[OpenAIChunkChoice]
    usage: NotRequired[OpenAIUsage | None]


class TextAnswer(Answer):
    """One object with the whole texts, or a chunk for each piece of a text."""

    may_be_slow = True
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, choices: Sequence[Choice], model: str, request_id: str, options: TextOptions) -> None:
        self._choices = choices
        self._streams = options.stream
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
            "object": self.chunk_kind if options.stream else self.kind,
        }
        self._usage = {"usage": None} if options.include_usage else {}
        """Of a chunk that is not the last one."""
        self._top_logprobs = options.logprobs or 0

    @property
    def has_enough(self) -> bool:
        """Whether a stop text was found in every choice."""
        return all(choice.has_stopped for choice in self._choices)

    @property
    def is_behind(self) -> bool:
        return any(choice.is_behind for choice in self._choices)

    def catch_up(self) -> None:
        next(choice for choice in self._choices if choice.is_behind).catch_up()

    @property
    def ends_slowly(self) -> bool:
        return any(choice.ends_slowly for choice in self._choices)

    @property
    def tokens(self) -> Tokens | None:
        """The tokens of all choices. The prompt counts once."""
        counts = [choice.tokens for choice in self._choices if choice.tokens is not None]
        if not counts:
            return None
        prompt = next((count.prompt for count in counts if count.prompt is not None), None)
        reasoning = [choice.reasoning_tokens for choice in self._choices if choice.reasoning_tokens is not None]
        return Tokens(prompt, sum(count.completion for count in counts), sum(reasoning) if reasoning else None)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Choice.add`."""
        choice = self._choices[response.choice]
        choice.add(response)
        if self._streams and choice.piece:
            return {**self._head, "choices": [self.chunk_choice(response.choice, choice.take())], **self._usage}
        return None

    def finish(self, error: GatewayError | None = None) -> Ending:
        """``usage`` is left out if the tokens cannot be counted. Raises the errors of :meth:`Choice.finish`."""
        pieces = [(index, piece) for index, choice in enumerate(self._choices) for piece in choice.finish(error)]
        early_exit = next((choice.early_exit for choice in self._choices if choice.early_exit is not None), None)
        usage = usage_of(self.tokens)
        if not self._streams:
            choices = [self.choice(*each) for each in pieces]
            return Ending(early_exit, [self._head | {"choices": choices} | ({} if usage is None else {"usage": usage})])
        chunks: list[Values] = [{**self._head, "choices": [self.chunk_choice(*each)], **self._usage} for each in pieces]
        if self._usage and usage is not None:
            chunks.append(self._head | {"choices": [], "usage": usage})
        return Ending(early_exit, chunks)

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> Values:
        """Renders a choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, piece: Piece) -> Values:
        """Renders the choice of a chunk."""


class CompletionAnswer(TextAnswer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def choice(self, index: int, piece: Piece) -> Values:
        return {
            "index": index,
            "text": "".join(piece.texts),
            "logprobs": completion_logprobs(piece.tokens, piece.offset),
            "finish_reason": piece.finish_reason,
        }

    chunk_choice = choice


class ChatAnswer(TextAnswer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, choices: Sequence[Choice], model: str, request_id: str, options: TextOptions) -> None:
        super().__init__(choices, model, request_id, options)
        self._begun: set[int] = set()

    def choice(self, index: int, piece: Piece) -> Values:
        """Has the content null beside calls without a text."""
        text, reasoning, further = "".join(piece.texts), "".join(piece.reasoning), _Further()
        if piece.calls:
            further["tool_calls"] = [
                {
                    "id": each.id,
                    "type": "function",
                    "function": {"name": each.name, "arguments": "".join(each.arguments)},
                }
                for each in piece.calls
            ]
        if reasoning:
            further["reasoning"] = further["reasoning_content"] = reasoning
        content = text or (None if piece.calls else "")
        message: OpenAIMessage = {"role": "assistant", "content": content, **further, "refusal": None}
        logprobs = chat_logprobs(piece.tokens, self._top_logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def chunk_choice(self, index: int, piece: Piece) -> Values:
        """The first chunk of a choice has the role, and a text unless it may have calls or reasoning."""
        delta: OpenAIDelta = {}
        if is_first := index not in self._begun:
            delta["role"] = "assistant"
            self._begun.add(index)
        if piece.texts or (is_first and not piece.is_read):
            delta["content"] = "".join(piece.texts)
        for call in piece.calls:
            arguments = "".join(call.arguments)
            part: OpenAICallDelta = {"index": call.index, "function": {"arguments": arguments}}
            if call.id:
                function: OpenAIFunctionDelta = {"name": call.name, "arguments": arguments}
                part = {"index": call.index, "id": call.id, "type": "function", "function": function}
            delta.setdefault("tool_calls", []).append(part)
        if piece.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = "".join(piece.reasoning)
        logprobs = None if piece.tokens is None else chat_logprobs(piece.tokens, self._top_logprobs)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}


def usage_of(tokens: Tokens | None) -> OpenAIUsage | None:
    """Returns None if the number of the prompt's tokens is not known."""
    if tokens is None or tokens.prompt is None:
        return None
    prompt, completion = tokens.prompt, tokens.completion
    usage: OpenAIUsage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if tokens.reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": min(tokens.reasoning, completion)}
    return usage


_FRAME = ServerSentEvent("%b", sep="\n").encode()
_DONE = ServerSentEvent("[DONE]", sep="\n").encode()


class ChunkResponse(StreamResponse):
    """The events of a stream in OpenAI's format: chunks, and ``[DONE]`` or an error at the end."""

    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Events have no ids and names, because OpenAI's clients use neither. An error has the single key ``error``."""
        return _DONE if event.name == "done" else _FRAME % event.data
