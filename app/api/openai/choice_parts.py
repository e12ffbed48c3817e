"""The pieces of the answer of one choice: its text, its calls and its reasoning."""

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta, Struct

from app.api.openai.logprobs import Alternatives
from app.core.errors import ToolCallMissing
from app.llm.answer_parser import Parser, Part

AT_ONCE = 4096
"""Characters that are read at once. This takes at most about 5 ms."""
MAX_CHECKED_CHARACTERS = 1024 * 1024
"""Limit of the arguments that are kept to check them."""


class CallPiece(Struct, frozen=True):
    """A part of a call. ``id`` and ``name``: empty after the first part."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Piece(Struct, frozen=True):
    """A part of an answer. ``offset``: the number of characters before it. ``tokens``: as the model describes them.

    ``is_read``: whether an :class:`AnswerReader` has read it, so that it can have calls or reasoning.
    """

    text: str = ""
    tokens: Sequence[Alternatives] | None = None
    finish_reason: str | None = None
    offset: int = 0
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    is_read: bool = False

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason or self.reasoning or self.calls)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Has one piece for each call."""
    by_index: dict[int, list[CallPiece]] = {}
    for call in (call for piece in pieces for call in piece.calls):
        by_index.setdefault(call.index, []).append(call)
    return Piece(
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens or ()]
        if any(piece.tokens is not None for piece in pieces)
        else None,
        finish_reason=next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), None),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=[
            CallPiece(index, of_call[0].id, of_call[0].name, "".join(piece.arguments for piece in of_call))
            for index, of_call in by_index.items()
        ],
        is_read=any(piece.is_read for piece in pieces),
    )


class AnswerReader:
    """``is_required``: an answer without a call is an error. ``is_parallel``: further calls are left out if not."""

    def __init__(
        self, parser: Parser, *, is_required: bool, is_named: bool, is_parallel: bool, has_short_ids: bool
    ) -> None:
        """``is_named``: the request names the function. ``has_short_ids``: as Mistral's templates want them."""
        self._parser = parser
        self._unread = deque[str]()
        self._is_required = is_required
        self._is_named = is_named
        self._is_parallel = is_parallel
        self._has_short_ids = has_short_ids
        self._count = 0
        self._arguments: list[list[str]] = []
        """Of each call, if they are checked."""
        self._checked_characters = 0

    @property
    def ends_with_calls(self) -> bool:
        """Whether the finish reason is ``tool_calls``. After a call that the request names, OpenAI's is ``stop``."""
        return self._count > 0 and not self._is_named

    @property
    def is_behind(self) -> bool:
        """Whether there is text that was not read yet. A further :meth:`add` reads on."""
        return bool(self._unread)

    def add(self, text: str, tokens: Sequence[Alternatives] | None = None) -> Piece:
        """Reads the text, or as much as can be read at once."""
        self._unread.extend(text[start : start + AT_ONCE] for start in range(0, len(text), AT_ONCE))
        parts: list[Part] = []
        left = AT_ONCE
        while self._unread and len(self._unread[0]) <= left:
            left -= len(self._unread[0])
            parts += self._parser.add(self._unread.popleft())
        return self._piece_of(parts, tokens)

    def finish(self) -> Piece:
        """Call it when the reader is not behind."""
        return self._piece_of(self._parser.finish())

    def check(self, finish_reason: str) -> None:
        """Raises ToolCallMissing if a call is required, and there is none or one that is complete but wrong."""
        if not self._is_required:
            return
        if not self._count:
            raise ToolCallMissing("The model did not call a function, which tool_choice requires.")
        if self._checked_characters > MAX_CHECKED_CHARACTERS:
            raise ToolCallMissing("The model called a function with arguments that are too large to be checked.")
        if finish_reason != "length" and not all(map(_is_object, self._arguments)):
            raise ToolCallMissing("The model called a function with arguments that are not a JSON object.")

    def _piece_of(self, parts: Sequence[Part], tokens: Sequence[Alternatives] | None = None) -> Piece:
        calls: list[CallPiece] = []
        for part in parts:
            if part.kind == "call":
                self._count += 1
                self._arguments.append([])
                id_ = secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}"
                calls.append(CallPiece(self._count - 1, id_, part.text))
            elif part.kind == "arguments":
                if self._is_required:
                    self._checked_characters += len(part.text)
                    if self._checked_characters <= MAX_CHECKED_CHARACTERS:
                        self._arguments[-1].append(part.text)
                calls.append(CallPiece(self._count - 1, arguments=part.text))
        return Piece(
            text="".join(part.text for part in parts if part.kind == "text"),
            tokens=tokens,
            reasoning="".join(part.text for part in parts if part.kind == "reasoning"),
            calls=calls if self._is_parallel else [call for call in calls if call.index == 0],
            is_read=True,
        )


def _is_object(pieces: Sequence[str]) -> bool:
    try:
        msgspec.json.decode("".join(pieces), type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return False
    return True


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
    index: Annotated[int, Meta(ge=0)]
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


def message_of(piece: Piece) -> OpenAIMessage:
    further: _Further = {}
    if piece.calls:
        further["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in piece.calls
        ]
    if piece.reasoning:
        further["reasoning"] = further["reasoning_content"] = piece.reasoning
    content = piece.text or (None if piece.calls else "")
    return {"role": "assistant", "content": content, **further, "refusal": None}


def delta_of(piece: Piece) -> OpenAIDelta:
    delta: OpenAIDelta = {"content": piece.text} if piece.text else {}
    if piece.calls:
        delta["tool_calls"] = [_delta_of(call) for call in piece.calls]
    if piece.reasoning:
        delta["reasoning"] = delta["reasoning_content"] = piece.reasoning
    return delta


def _delta_of(call: CallPiece) -> OpenAICallDelta:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: OpenAIFunctionDelta = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
