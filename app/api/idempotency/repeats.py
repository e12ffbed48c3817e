"""A repeated request gets the first answer: the requests with a key that run, and the answers that are kept."""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from app.core.errors import ClientError, GatewayError
from app.streams.quota import KeepLimits, KeepQuota, KeptStream
from app.streams.store import Notes, StartedStream, StreamStore

Answer = TypeVar("Answer")
Name = tuple[str, str, str]
"""The id of the API key, the idempotency key, and the pipeline; empty for streams, which name it in their body."""
CLAIM_S = 4.0
"""A claim of a process that has died is free after this time."""
POLL_S = 0.1
"""How often a request looks whether the first one, in another process, is answered."""


class IdempotencyKeyReused(
    ClientError, code="idempotency_key_reused", title="The idempotency key belongs to another request"
): ...


class Repeatable(Struct, frozen=True, eq=False):
    """A request with a key. ``digest``: of its content. ``late``: its error if it waited ``wait_s`` for another one."""

    name: Name
    digest: str
    wait_s: float
    late: GatewayError

    def check(self, digest: str) -> None:
        """``digest``: of the first request with this key. Raises IdempotencyKeyReused."""
        if digest != self.digest:
            text = "This Idempotency-Key was sent with another body."
            raise IdempotencyKeyReused(text, hint="Use a new key, such as a UUID, for each new request.")


class _Claim(Struct, eq=False):
    """``answer``: None after an error, which is not kept."""

    digest: str
    answer: asyncio.Future[Any]


class Repeats:
    """Of this process. The oldest answers are dropped first; one API key may use half of the limits."""

    def __init__(self, limits: KeepLimits) -> None:
        self._quota = KeepQuota(limits)
        self._claims: dict[Name, _Claim] = {}
        self._kept: dict[KeptStream, tuple[Name, _Claim]] = {}

    async def once(
        self,
        request: Repeatable,
        run: Callable[[], Awaitable[Answer]],
        *,
        is_kept: Callable[[Answer], Awaitable[bool]],
        kept_as: Callable[[Answer], tuple[int, float]] | None,
    ) -> Answer:
        """The answer of the first request with this key, if it runs or is kept, otherwise that of ``run``.

        ``is_kept``: whether the answer is still of use. ``kept_as``: its size in bytes, and for how many seconds it is
        kept; None: only for the requests that wait for it.

        Raises IdempotencyKeyReused, ``request.late``, and the errors of ``run``.
        """
        name, ends = request.name, monotonic() + request.wait_s
        while (claim := self._claims.get(name)) is not None:
            request.check(claim.digest)
            await asyncio.wait([claim.answer], timeout=max(ends - monotonic(), 0.0))
            if not claim.answer.done():
                raise request.late
            known: Answer | None = claim.answer.result()
            if known is not None and await is_kept(known):
                return known
            self._forget(name, claim)
        claim = self._claims[name] = _Claim(request.digest, asyncio.get_running_loop().create_future())
        answer: Answer | None = None
        try:
            answer = await run()
        finally:
            claim.answer.set_result(answer)
            if answer is None or kept_as is None:
                self._forget(name, claim)
        if kept_as is not None:
            self._keep(name, claim, *kept_as(answer))
        return answer

    def _keep(self, name: Name, claim: _Claim, size: int, keep_s: float) -> None:
        kept = KeptStream("", name[0])
        kept.size += size
        self._kept[kept] = name, claim
        self._quota.add(kept)
        self._quota.mark(kept, evictable=True)
        while self._quota.is_over(kept.caller) and (victim := self._quota.victim(kept.caller)) is not None:
            self._drop(victim)
        asyncio.get_running_loop().call_later(keep_s, self._drop, kept)

    def _drop(self, kept: KeptStream) -> None:
        if (known := self._kept.pop(kept, None)) is not None:
            self._quota.remove(kept)
            self._forget(*known)

    def _forget(self, name: Name, claim: _Claim) -> None:
        if self._claims.get(name) is claim:
            del self._claims[name]


class _Note(Struct):
    """``token``: of the request that made the claim. ``started``: None while it runs."""

    digest: str
    token: str
    started: StartedStream | None = None


async def once_of_all(
    notes: Notes, store: StreamStore, request: Repeatable, run: Callable[[], Awaitable[StartedStream]]
) -> StartedStream:
    """As :meth:`Repeats.once`, among all processes. Also raises UpstreamUnavailable."""
    ends, own = monotonic() + request.wait_s, _Note(request.digest, secrets.token_hex(8))
    caller, sent, _ = request.name
    claim, key = msgspec.json.encode(own), hashlib.sha256(f"{len(caller)}:{caller}:{sent}".encode()).hexdigest()
    try:
        while (known := await notes.claim(key, claim, CLAIM_S)) is not None:
            note = msgspec.json.decode(known, type=_Note)
            request.check(note.digest)
            if note.started is not None and await store.has(note.started.id):
                return note.started
            if note.started is not None:
                await notes.replace(key, known, b"")
            elif monotonic() >= ends:
                raise request.late
            else:
                await asyncio.sleep(POLL_S)
        renewing = asyncio.create_task(_renew(notes, key, claim))
        try:
            own.started = await run()
        finally:
            renewing.cancel()
        await notes.replace(key, claim, msgspec.json.encode(own), own.started.keep_s)
    except BaseException:
        with suppress(GatewayError):
            await notes.replace(key, claim, b"")
        if own.started is not None:  # no client has its id, and a repeated request starts another one
            with suppress(GatewayError):
                await store.delete(own.started.id)
        raise
    return own.started


async def _renew(notes: Notes, key: str, claim: bytes) -> None:
    while True:
        await asyncio.sleep(CLAIM_S / 4)
        with suppress(GatewayError):
            await notes.replace(key, claim, claim, CLAIM_S)
