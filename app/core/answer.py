"""The conversion of a model's responses to the caller's values."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from msgspec import Struct

from app.core.errors import GatewayError
from app.core.inference import InferenceResponse

Values = dict[str, Any]


class Ending(Struct, frozen=True):
    """The end of an answer: the reason of an early exit, and the outputs that must still be written."""

    early_exit: str | None = None
    """Of a batch: the first reason, if every item has one."""
    outputs: Sequence[Values] = ()
    early_exits: Sequence[str | None] | None = None
    """Of a batch: the reason of each item. None for any other answer."""

    @property
    def shown_exit(self) -> str | Sequence[str | None] | None:
        """What callers see as ``early_exit``."""
        return self.early_exit if self.early_exits is None else self.early_exits


class Tokens(Struct):
    """The numbers of tokens so far. ``prompt``: None if it is not known. ``reasoning``: of the completion; the same."""

    prompt: int | None = None
    completion: int = 0
    reasoning: int | None = None

    def __add__(self, other: "Tokens") -> "Tokens":
        known = [each.prompt for each in (self, other) if each.prompt is not None]
        return Tokens(sum(known) if known else None, self.completion + other.completion)


class Answer:
    """Converts the responses of one request, without I/O. After an error of :meth:`add`, add no further response.

    The answer of a stream writes an output for each response. A whole answer writes its only output at the end. This
    base class writes none.
    """

    may_be_slow: ClassVar[bool] = False
    """Whether :attr:`is_behind` and :attr:`ends_slowly` may be true."""

    @property
    def has_enough(self) -> bool:
        """Whether the caller does not need further responses."""
        return False

    @property
    def tokens(self) -> Tokens | None:
        """The tokens of a language model; None if nothing counts them."""
        return None

    @property
    def is_behind(self) -> bool:
        """Whether a part of the responses was not read yet. Call :meth:`catch_up` before :meth:`finish` then."""
        return False

    def catch_up(self) -> None:
        """Reads as much as can be read at once, in at most about 5 ms."""

    @property
    def ends_slowly(self) -> bool:
        """Whether :meth:`finish` may take so long that other requests would wait for it."""
        return False

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the output of a response; None if nothing is to be written. Raises GatewayError."""
        return None

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Called after the last response, or after an error. Raises the error for the caller."""
        if error is not None:
            raise error
        return Ending()


_ends = ThreadPoolExecutor(1, "ends")
"""Finishes the answers that end slowly, one after the other."""
_turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
"""One answer at a time catches up, so that other requests get every second turn of the loop."""


async def ending_of(answer: Answer, error: GatewayError | None = None) -> Ending:
    """Returns ``answer.finish(error)``, from a thread if it takes long. Raises the error for the caller."""
    if not answer.may_be_slow:
        return answer.finish(error)
    loop = asyncio.get_running_loop()
    while answer.is_behind:
        async with _turns.setdefault(loop, asyncio.Lock()):
            answer.catch_up()
            await asyncio.sleep(0)
    if answer.ends_slowly:
        return await loop.run_in_executor(_ends, answer.finish, error)
    return answer.finish(error)
