"""The objects of an answer: a completion or a chat completion, whole or in chunks. One rendering for each answer.

Source: the types of OpenAI's Python client. ``usage`` is omitted if the pipeline does not count tokens.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from app.api.openai.usage import Usage

Values = dict[str, Any]


class Rendering(ABC):
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, model: str, request_id: str, *, include_usage: bool) -> None:
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, text: str, finish_reason: str, usage: Usage | None) -> Values:
        values = self._object(self.whole_object, [self._choice(text, finish_reason)])
        return values if usage is None else {**values, "usage": usage}

    def chunk(self, text: str) -> Values:
        return self._chunk([self._chunk_choice(text, None)])

    def last_chunks(self, finish_reason: str, usage: Usage | None) -> Sequence[Values]:
        last = self._chunk([self._chunk_choice("", finish_reason)])
        return [last, {**self._chunk([]), "usage": usage}] if self._include_usage else [last]

    def _chunk(self, choices: Sequence[Values]) -> Values:
        values = self._object(self.chunk_object, choices)
        return {**values, "usage": None} if self._include_usage else values

    def _object(self, name: str, choices: Sequence[Values]) -> Values:
        return {**self._head, "object": name, "choices": choices}

    @abstractmethod
    def _choice(self, text: str, finish_reason: str) -> Values: ...

    @abstractmethod
    def _chunk_choice(self, text: str, finish_reason: str | None) -> Values: ...


class CompletionRendering(Rendering):
    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def _choice(self, text: str, finish_reason: str | None) -> Values:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    _chunk_choice = _choice


class ChatRendering(Rendering):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    _has_begun = False

    def _choice(self, text: str, finish_reason: str) -> Values:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def _chunk_choice(self, text: str, finish_reason: str | None) -> Values:
        """The first chunk has the role."""
        delta = {} if self._has_begun else {"role": "assistant"}
        if text or not self._has_begun:
            delta["content"] = text
        self._has_begun = True
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
