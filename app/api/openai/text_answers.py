"""The answers to completions and chat completions, whole or in chunks. Source: the types of OpenAI's Python client."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from weakref import WeakKeyDictionary

from msgspec import Meta
from sse_starlette import ServerSentEvent

from app.api.openai.choices import Choice, TextOptions
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


class OpenAIMessage(TypedDict):
    tool_calls: NotRequired[list[OpenAICall]]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
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


_ends = ThreadPoolExecutor(1, "ends")
"""Finishes the answers that end slowly, one after the other."""
_turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
"""One answer at a time catches up, so that other requests get every second turn of the loop."""


class TextAnswer(Answer):
    """One object with the whole texts, or a chunk for each piece of a text."""

    has_enough = False
    """Whether a stop text was found in every choice."""

    def __init__(self, choices: Sequence[Choice], model: str, request_id: str, options: TextOptions) -> None:
        first = choices[0]
        self._choices = choices
        self._streams = options.stream
        self._head = {
            "id": f"{first.id_prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
            "object": first.chunk_kind if options.stream else first.kind,
        }
        self._usage = {"usage": None} if options.include_usage else {}
        """Of a chunk that is not the last one."""

    @property
    def tokens(self) -> Tokens | None:
        """The tokens of all choices. The prompt counts once."""
        counts = [choice.tokens for choice in self._choices if choice.tokens is not None]
        if not counts:
            return None
        prompt = next((count.prompt for count in counts if count.prompt is not None), None)
        reasoning = [count.reasoning for count in counts if count.reasoning is not None]
        return Tokens(prompt, sum(count.completion for count in counts), sum(reasoning) if reasoning else None)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Choice.add`."""
        choice = self._choices[response.choice]
        chunk = choice.add(response)
        if choice.has_stopped:
            self.has_enough = all(each.has_stopped for each in self._choices)
        if chunk is None:
            return None
        return {**self._head, "choices": [{"index": response.choice, **chunk}], **self._usage}

    def finish(self, error: GatewayError | None = None) -> Ending:
        """``usage`` is left out if the tokens cannot be counted. Raises the errors of :meth:`Choice.finish`."""
        rests = [
            {"index": index, **each} for index, choice in enumerate(self._choices) for each in choice.finish(error)
        ]
        early_exit = next((choice.early_exit for choice in self._choices if choice.early_exit is not None), None)
        usage, tokens = dict[str, OpenAIUsage](), self.tokens
        if tokens is not None and tokens.prompt is not None:
            prompt, completion = tokens.prompt, tokens.completion
            total = prompt + completion
            usage["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
            if tokens.reasoning is not None:
                details: OpenAIReasoning = {"reasoning_tokens": min(tokens.reasoning, completion)}
                usage["usage"]["completion_tokens_details"] = details
        if not self._streams:
            return Ending(early_exit, [{**self._head, "choices": rests, **usage}])
        chunks: list[Values] = [{**self._head, "choices": [each], **self._usage} for each in rests]
        if self._usage and usage:
            chunks.append({**self._head, "choices": [], **usage})
        return Ending(early_exit, chunks)

    async def end(self, error: GatewayError | None = None) -> Ending:
        """Reads the rest of the text in pieces, and finishes in a thread if that takes long."""
        loop = asyncio.get_running_loop()
        for choice in self._choices:
            while choice.is_behind:
                async with _turns.setdefault(loop, asyncio.Lock()):
                    choice.catch_up()
                    await asyncio.sleep(0)
        if any(choice.ends_slowly for choice in self._choices):
            return await loop.run_in_executor(_ends, self.finish, error)
        return self.finish(error)


_FRAME = ServerSentEvent("%b", sep="\n").encode()
_DONE = ServerSentEvent("[DONE]", sep="\n").encode()


class ChunkResponse(StreamResponse):
    """The events of a stream in OpenAI's format: chunks, and ``[DONE]`` or an error at the end."""

    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Events have no ids and names, because OpenAI's clients use neither. An error has the single key ``error``."""
        return _DONE if event.name == "done" else _FRAME % event.data
