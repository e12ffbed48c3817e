"""The calls and the reasoning in the answer of one choice."""

import secrets
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from app.core.answer import Values
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


class Reading(Struct, frozen=True):
    """What a piece of the model's text is."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


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

    def add(self, text: str) -> Reading:
        """Reads the text, or as much as can be read at once."""
        self._unread.extend(text[start : start + AT_ONCE] for start in range(0, len(text), AT_ONCE))
        parts: list[Part] = []
        left = AT_ONCE
        while self._unread and len(self._unread[0]) <= left:
            left -= len(self._unread[0])
            parts += self._parser.add(self._unread.popleft())
        return self._reading(parts)

    def finish(self) -> Reading:
        """Call it when the reader is not behind."""
        return self._reading(self._parser.finish())

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

    def _reading(self, parts: Sequence[Part]) -> Reading:
        calls: list[CallPiece] = []
        for part in parts:
            if part.kind == "call":
                calls.append(self._begun(part.text))
            elif part.kind == "arguments":
                calls.append(self._continued(part.text))
        return Reading(
            "".join(part.text for part in parts if part.kind == "text"),
            "".join(part.text for part in parts if part.kind == "reasoning"),
            calls if self._is_parallel else [call for call in calls if call.index == 0],
        )

    def _begun(self, name: str) -> CallPiece:
        self._count += 1
        self._arguments.append([])
        id_ = secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}"
        return CallPiece(self._count - 1, id_, name)

    def _continued(self, arguments: str) -> CallPiece:
        if self._is_required:
            self._checked_characters += len(arguments)
            if self._checked_characters <= MAX_CHECKED_CHARACTERS:
                self._arguments[-1].append(arguments)
        return CallPiece(self._count - 1, arguments=arguments)


def _is_object(pieces: Sequence[str]) -> bool:
    try:
        msgspec.json.decode("".join(pieces), type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return False
    return True


def joined_readings(readings: Sequence[Reading]) -> Reading:
    """Has one piece for each call."""
    by_index: dict[int, list[CallPiece]] = {}
    for call in (call for reading in readings for call in reading.calls):
        by_index.setdefault(call.index, []).append(call)
    calls = [
        CallPiece(index, pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces))
        for index, pieces in by_index.items()
    ]
    return Reading("".join(each.text for each in readings), "".join(each.reasoning for each in readings), calls)


def message_of(reading: Reading) -> Values:
    """The members ``content``, ``tool_calls``, ``reasoning`` and ``reasoning_content`` of a whole message."""
    calls = [_described(call) for call in reading.calls]
    return {
        "content": reading.text or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
        **_reasoning_of(reading.reasoning),
    }


def delta_of(reading: Reading) -> Values:
    """The same members, those that a chunk has."""
    calls = [{"index": call.index, **_described(call)} for call in reading.calls]
    return {
        **({"content": reading.text} if reading.text else {}),
        **({"tool_calls": calls} if calls else {}),
        **_reasoning_of(reading.reasoning),
    }


def _reasoning_of(text: str) -> Mapping[str, str]:
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _described(call: CallPiece) -> Values:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
