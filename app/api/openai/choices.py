"""An answer and its choices: what a model wrote, up to a stop text, as text, reasoning and calls."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import ClassVar
from weakref import WeakKeyDictionary

import msgspec
from sse_starlette import ServerSentEvent

from app.api.openai.chat_request import NO_TOOLS, Image, ToolUse
from app.api.openai.requests import openai_names
from app.api.streaming import StreamResponse
from app.core.answer import Answer, Ending, Tokens, Values
from app.core.errors import ContractViolation, FormatMismatch, GatewayError, ToolCallMissing
from app.core.inference import InferenceRequest, InferenceResponse
from app.core.text import shown
from app.llm.answer_parser import Parser, Part, begun_at
from app.llm.answer_schema import MAX_ANSWER_CHARACTERS, TOO_LARGE, AnswerSchema
from app.llm.template import Message
from app.llm.tokenizer import COUNTED_AT_ONCE, TokenCounter
from app.pipelines.openai_mapping import TextForm
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector
from app.streams.stream import Event

AT_ONCE = 4096
"""Characters that are read at once. This takes at most about 5 ms."""
MAX_CHECKED_CHARACTERS = 1024 * 1024
"""Limit of the arguments that are kept to check them."""
_LONG_TEXT = 64 * 1024
"""Characters of an answer whose check takes long."""


@dataclass(slots=True)
class TextOptions:
    """What the gateway itself reads of a request. An answer depends on it besides the responses of the model."""

    stream: bool = False
    include_usage: bool = False
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    """Whether the text ends with the stop text."""
    choices: int = 1
    logprobs: int | None = None
    """The number of alternatives for a token; None for no log probabilities."""
    messages: Sequence[Message] = ()
    images: Sequence[Image] = ()
    """The messages and images of a chat, until its requests are made."""
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


Alternatives = Sequence[tuple[str, float]]
"""The texts and log probabilities of a token: the chosen one first, then the most probable ones."""
LEAST = -9999.0
"""OpenAI's number for a token that has no probability."""


class StopMatcher:
    """Ends a text before the caller's first stop text, or after it, for any division of the text into pieces.

    If several stop texts end at the same place, the longest one counts. Keeps text that may be the beginning of a stop
    text.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = stops
        self._keeps_stop = keeps_stop
        self.held = ""
        """The kept text."""
        self.has_stopped = False

    def add(self, piece: str) -> str:
        """Returns the text that cannot be part of a stop text; empty after a stop text."""
        if self.has_stopped:
            return ""
        text = self.held + piece
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if found:
            self.has_stopped, self.held = True, ""
            end, start = min(found)
            return text[: end if self._keeps_stop else start]
        certain = begun_at(text, 0, self._stops)
        self.held = text[certain:]
        return text[:certain]


class Choice(ABC):
    """Collects the responses of one request, and renders a whole choice or its chunks.

    The pipeline's own collector checks the contract and detects early exits, which become an empty text here.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

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
        self._parser = options.parser()
        logprobs = form.openai.logprobs
        self._tokens_field = None if logprobs is None or options.logprobs is None else logprobs.output
        self._counted = None if options.prompt_tokens is None else Tokens(options.prompt_tokens)
        """The tokens that the gateway counts; None if the model counts them, or nothing does."""
        self._written: list[str] = []
        """All text, for the tokenizer."""
        self._reasoned: list[str] = []
        """All reasoning, for the same."""
        self._checked: list[str] = []
        """The text for the caller, if its format is checked."""
        self._length = 0
        """The length of the text in earlier chunks; ``_read_length`` is that of the model's text."""
        self._read_length = 0
        self.unread = deque[str]()
        """Text that was not read yet. :meth:`catch_up` reads on."""
        self._arguments: list[list[str]] = []
        """One for each call: its arguments, if a call is required."""
        self._arguments_length = 0
        self._is_first = True
        """Whether there was no chunk. The next one has these:"""
        self._texts = [options.prompt] if options.prompt else []
        self._tokens: list[Alternatives] | None = None
        self._reasoning: list[str] = []
        self._calls: list[Values] = []
        """With the pieces of their arguments. Only the first part of a call has an id, a type and a name."""
        self.has_stopped = False
        """Whether a stop text was found."""
        self.finish_reason = "stop"
        self.early_exit: str | None = None

    @property
    def ends_slowly(self) -> bool:
        options = self._options
        counts = options.counter is not None or options.reasoning_counter is not None
        checks = options.schema is not None and (options.schema.validator is not None or self._read_length > _LONG_TEXT)
        return checks or (counts and self._read_length > COUNTED_AT_ONCE)

    @property
    def tokens(self) -> Tokens | None:
        return self._collector.tokens or self._counted

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the next chunk of a stream, if there is one. Raises the errors of :meth:`Collector.add`."""
        if self.has_stopped:
            self._collector.count(response)
        elif (values := self._collector.add(response)) is not None:
            self._write(values)
            if self._options.stream:
                return self._chunk()
        return None

    def catch_up(self) -> None:
        """Reads as much of the unread text as can be read at once."""
        left = AT_ONCE
        while self._parser is not None and self.unread and len(self.unread[0]) <= left:
            left -= len(self.unread[0])
            self._divide(self._parser.add(self.unread.popleft()))

    def finish(self, error: GatewayError | None = None) -> Sequence[Values]:
        """Returns the rest, when all text was read. The last chunk of a stream has only the finish reason.

        Raises ToolCallMissing, FormatMismatch, or the errors of :meth:`Collector.finish`.
        """
        options = self._options
        if not self.has_stopped:
            with openai_names(self._names):
                ending = self._collector.finish(error)
            self.early_exit = ending.early_exit
            for values in ending.outputs:
                self._write(values)
            self._write(None)
        if self.early_exit is not None:
            self.finish_reason = self._form.openai.exits.get(self.early_exit, self.finish_reason)
        if self._parser is not None:
            self._divide(self._parser.finish())
        if options.tools.is_required and self.early_exit is None:
            self._check_calls()
        # After a call that the request names, OpenAI's finish reason is ``stop``.
        if self._arguments and not options.tools.is_named and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        rest = self._chunk() if options.stream else None
        end = self._chunk(self.finish_reason)
        if options.schema is not None and self.early_exit is None and self.finish_reason == "stop":
            # An answer with a call, or that the model did not end, may have any format.
            is_whole = self._length <= MAX_ANSWER_CHARACTERS
            problem = options.schema.problem_of("".join(self._checked)) if is_whole else TOO_LARGE
            if problem is not None:
                raise FormatMismatch(f"The model's answer {shown(problem, 256)}.")
        if self._counted is not None and options.counter is not None:
            self._counted.completion = options.counter("".join(self._written))
        if options.reasoning_counter is not None and self.tokens is not None:
            self.tokens.reasoning = options.reasoning_counter("".join(self._reasoned))
        return [chunk for chunk in (rest, end) if chunk is not None]

    @abstractmethod
    def rendered(self, finish_reason: str | None) -> Values:
        """The members of a whole choice, or of a chunk with what was written since the last one."""

    def _chunk(self, finish_reason: str | None = None) -> Values | None:
        """Takes what was written since the last call; None for nothing and no finish reason."""
        if finish_reason is None and not (self._texts or self._tokens or self._reasoning or self._calls):
            self._tokens = None
            return None
        chunk = self.rendered(finish_reason)
        self._length += sum(map(len, self._texts))
        if self._options.schema is not None and self._length <= MAX_ANSWER_CHARACTERS:
            self._checked += self._texts
        if self._options.reasoning_counter is not None:
            self._reasoned += self._reasoning
        self._texts, self._tokens, self._reasoning, self._calls, self._is_first = [], None, [], [], False
        return chunk

    def _check_calls(self) -> None:
        """Raises ToolCallMissing if there is no call, or one that is complete but wrong."""
        if not self._arguments:
            raise ToolCallMissing("The model did not call a function, which tool_choice requires.")
        if self._arguments_length > MAX_CHECKED_CHARACTERS:
            raise ToolCallMissing("The model called a function with arguments that are too large to be checked.")
        try:  # a call that the model did not end is not complete
            for arguments in self._arguments if self.finish_reason != "length" else ():
                msgspec.json.decode("".join(arguments), type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            text = "The model called a function with arguments that are not a JSON object."
            raise ToolCallMissing(text) from None

    def _write(self, values: Values | None) -> None:
        """Writes the values of one response; None for the rest after the last one."""
        if values is None:
            text = "" if self._matcher is None else self._matcher.held
        else:
            reason, text = self._form.finish_reason, values[self._form.text] or ""
            if reason is not None and values[reason]:
                self.finish_reason = "length" if values[reason] == "length" else "stop"
            self._read_length += len(text)
            if self._counted is not None:
                self._written.append(text)
            if (name := self._tokens_field) is not None and values[name] is not None:
                try:
                    tokens = msgspec.convert(values[name], list[dict[str, Values]])
                except msgspec.ValidationError as exc:
                    problem = f"Output '{name}' is not a list with an object for each token."
                    raise ContractViolation(problem, tensor=name) from exc
                self._tokens = self._tokens or []
                self._tokens += map(alternatives_of, tokens)
            if self._matcher is not None:
                text = self._matcher.add(text)
                if self._matcher.has_stopped:
                    self.has_stopped, self.finish_reason = True, "stop"
        if self._parser is not None:
            self.unread.extend(text[start : start + AT_ONCE] for start in range(0, len(text), AT_ONCE))
            self.catch_up()
        elif text:
            self._texts.append(text)

    def _divide(self, parts: Sequence[Part]) -> None:
        """Writes the parts of a text. Calls after the first are left out if the request does not allow them."""
        tools = self._options.tools
        for part in parts:
            if part.kind == "text":
                self._texts.append(part.text)
            elif part.kind == "reasoning":
                self._reasoning.append(part.text)
            elif part.kind == "call":
                self._arguments.append([])
                if len(self._arguments) == 1 or tools.is_parallel:
                    is_short = self._form.tools == "mistral"  # as its templates want ids
                    id_ = secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"
                    index = {"index": len(self._arguments) - 1} if self._options.stream else {}
                    function = {"name": part.text, "arguments": []}
                    self._calls.append({**index, "id": id_, "type": "function", "function": function})
            else:
                if tools.is_required:
                    self._arguments_length += len(part.text)
                    if self._arguments_length <= MAX_CHECKED_CHARACTERS:
                        self._arguments[-1].append(part.text)
                if len(self._arguments) == 1 or tools.is_parallel:
                    if not self._calls:
                        self._calls.append({"index": len(self._arguments) - 1, "function": {"arguments": []}})
                    self._calls[-1]["function"]["arguments"].append(part.text)


class CompletionChoice(Choice):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def rendered(self, finish_reason: str | None) -> Values:
        logprobs = None if self._tokens is None else completion_logprobs(self._tokens, self._length)
        return {"text": "".join(self._texts), "logprobs": logprobs, "finish_reason": finish_reason}


class ChatChoice(Choice):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def rendered(self, finish_reason: str | None) -> Values:
        """A message has the content null beside calls without a text.

        The first chunk of a choice has the role, and a text unless it may have calls or reasoning.
        """
        streams, text, calls = self._options.stream, "".join(self._texts), self._calls
        for call in calls:
            call["function"]["arguments"] = "".join(call["function"]["arguments"])
        message: Values = {"role": "assistant"} if self._is_first else {}
        if not streams:
            message["content"] = text or (None if calls else "")
        elif self._texts or (self._is_first and self._parser is None):
            message["content"] = text
        if calls:
            message["tool_calls"] = calls
        if self._reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(self._reasoning)
        if not streams:
            message["refusal"] = None
        logprobs = None if self._tokens is None else chat_logprobs(self._tokens, self._options.logprobs or 0)
        return {"delta" if streams else "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def alternatives_of(token: Mapping[str, Values]) -> Alternatives:
    """``token``: as vLLM's ``Logprob`` describes it: token id -> ``{"logprob", "rank", "decoded_token"}``."""
    found = [(str(each.get("decoded_token") or ""), each.get("logprob")) for each in token.values()]
    return [(text, max(float(number), LEAST) if isinstance(number, int | float) else LEAST) for text, number in found]


def completion_logprobs(tokens: Sequence[Alternatives], offset: int) -> Values:
    """``offset``: the number of characters before the first token."""
    chosen = [next(iter(token), ("", LEAST)) for token in tokens]
    texts = [text for text, _ in chosen]
    return {
        "tokens": texts,
        "token_logprobs": [number for _, number in chosen],
        "top_logprobs": list(map(dict, tokens)),
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
    }


def chat_logprobs(tokens: Sequence[Alternatives], most: int) -> Values:
    """``most``: the number of alternatives for a token."""

    def described(text: str, number: float) -> Values:
        return {"token": text, "logprob": number, "bytes": list(text.encode())}

    content = []
    for token in tokens:
        probable = sorted(token, key=itemgetter(1), reverse=True)[:most]
        chosen = described(*next(iter(token), ("", LEAST)))
        content.append({**chosen, "top_logprobs": [described(*each) for each in probable]})
    return {"content": content, "refusal": None}


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
        """The member ``usage`` of each chunk but the last."""

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
        usage, tokens = Values(), self.tokens
        if tokens is not None and tokens.prompt is not None:
            prompt, completion = tokens.prompt, tokens.completion
            total = prompt + completion
            usage["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
            if tokens.reasoning is not None:
                details = {"reasoning_tokens": min(tokens.reasoning, completion)}
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
            while choice.unread:
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
