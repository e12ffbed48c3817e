"""A repeated request gets the first answer: the keys that callers send with their requests, and what they stand for."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from app.core.errors import GatewayError, IdempotencyKeyReused

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """``caller``: the id of the API key; empty without one. ``digest``: of the request, to recognize another one.

    ``scope``: the pipeline; empty for streams, whose pipeline is in the request.
    """

    caller: str
    key: str
    digest: str
    scope: str = ""


class Repeats(ABC, Generic[Answer]):
    poll_s = 0.1

    async def claim(self, key: RepeatKey, wait_s: float, late: GatewayError) -> Answer | None:
        """Returns the answer of the first request with this key, if it is still kept.

        None: the key belongs to this request now, which must keep its answer or call :meth:`release`. Waits while
        another request has the key.

        Raises IdempotencyKeyReused, UpstreamUnavailable, or ``late`` after ``wait_s``.
        """
        ends = monotonic() + wait_s
        while (claimed := await self._claimed(key)) is not None:
            digest, answer = claimed
            if digest != key.digest:
                text = "This Idempotency-Key was sent with another body."
                raise IdempotencyKeyReused(text, hint="Use a new key, such as a UUID, for each new request.")
            if answer is not None:
                return answer
            if monotonic() >= ends:
                raise late
            await asyncio.sleep(min(self.poll_s, max(ends - monotonic(), 0.0)))
        return None

    @abstractmethod
    async def release(self, key: RepeatKey) -> None:
        """Frees a claimed key without an answer. Raises UpstreamUnavailable."""

    @abstractmethod
    async def _claimed(self, key: RepeatKey) -> tuple[str, Answer | None] | None:
        """Returns the digest of the earlier claim of this key, and its answer; None: the key is this request's now."""


class MemoryRepeats(Repeats[Answer]):
    """Has one entry for each running request with a key, and for each kept answer."""

    poll_s = 0.01

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str, str], tuple[str, Answer | None]] = {}

    async def _claimed(self, key: RepeatKey) -> tuple[str, Answer | None] | None:
        claimed = self._claims.get((key.caller, key.scope, key.key))
        if claimed is None:
            self.keep(key, None)
        return claimed

    def keep(self, key: RepeatKey, answer: Answer | None) -> None:
        self._claims[key.caller, key.scope, key.key] = key.digest, answer

    async def release(self, key: RepeatKey) -> None:
        if self._claims[key.caller, key.scope, key.key][1] is None:
            self.forget(key)

    def forget(self, key: RepeatKey) -> None:
        del self._claims[key.caller, key.scope, key.key]
