"""Answers a request with an ``Idempotency-Key`` that was sent before as it was answered then."""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from app.api.bodies import off_loop
from app.api.endpoint import Endpoint, Layer, Once
from app.api.error_table import add_rows
from app.api.exchange import Exchange
from app.api.openapi import Operation, header
from app.core.answer import WholeAnswer
from app.core.errors import ClientError, DeadlineExceeded, GatewayError, InvalidRequest, TooManyRequests
from app.core.inference import BYTES, Deadline, InferenceRequest
from app.streams.store import KeepLimits, KeepQuota, KeptStream, StartedStream, StreamStore

Answer = TypeVar("Answer")
MAX_LENGTH = 255
KEEP_S = 60.0
ANSWER_LIMITS = KeepLimits(16 * 1024 * 1024, 4096)
START_LIMITS = KeepLimits(max_streams=100_000, max_bytes=2**62)
LONGEST_START_S = 30.0
"""How long a repeated start waits for the first one, which may wait for a slot of its model."""
CLAIM_S = 4.0
"""A claim of a process that has died is free after this time."""
POLL_S = 0.1
"""How often a request looks whether the first one, in another process, is answered."""


class IdempotencyKeyReused(ClientError, title="The idempotency key belongs to another request"): ...


add_rows("app.api.idempotency", globals())
_HEADER = header(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH, "pattern": "^[ -~]+$"},
    "A unique key, such as a UUID: a repeated request with the same body gets the first answer again.",
)


class Repeatable(Struct, frozen=True, eq=False):
    """A request with a key. ``id``: of its caller, and what it repeats. ``digest``: of its content.

    ``late``: its error if it waited ``wait_s`` for another one.
    """

    id: str
    caller: str
    digest: str
    wait_s: float
    late: GatewayError

    def check(self, digest: str) -> None:
        """``digest``: of the first request with this key. Raises IdempotencyKeyReused."""
        if digest != self.digest:
            text = "This Idempotency-Key was sent with another body."
            raise IdempotencyKeyReused(text, hint="Use a new key, such as a UUID, for each new request.")


@dataclass(slots=True, eq=False, kw_only=True)
class _Claim(KeptStream):
    """``answer``: None after an error, which is not kept."""

    digest: str
    answer: asyncio.Future[Any]


class Repeats:
    """The requests of this process that run, and the answers that are kept.

    The oldest answers are dropped first; one API key may use half of the limits.
    """

    def __init__(self, limits: KeepLimits) -> None:
        self._quota = KeepQuota(limits)
        self._claims: dict[str, _Claim] = {}

    async def once(
        self,
        request: Repeatable,
        run: Callable[[], Awaitable[Answer]],
        kept_as: Callable[[Answer], tuple[int, float]],
        is_kept: Callable[[Answer], Awaitable[bool]] | None = None,
    ) -> Answer:
        """The answer of the first request with this key, if it runs or is kept, otherwise that of ``run``.

        ``kept_as``: the size of an answer in bytes, and for how many seconds it is kept. ``is_kept``: whether it is
        still of use; None: always.

        Raises IdempotencyKeyReused, ``request.late``, and the errors of ``run``.
        """
        ends, loop = monotonic() + request.wait_s, asyncio.get_running_loop()
        while (first := self._claims.get(request.id)) is not None:
            request.check(first.digest)
            await asyncio.wait([first.answer], timeout=max(ends - monotonic(), 0.0))
            if not first.answer.done():
                raise request.late
            known: Answer | None = first.answer.result()
            if known is not None and (is_kept is None or await is_kept(known)):
                return known
            self._drop(first)
        claim = _Claim(request.id, request.caller, digest=request.digest, answer=loop.create_future())
        self._claims[claim.id] = claim
        self._quota.add(claim)
        try:
            answer = await run()
        except BaseException:
            claim.answer.set_result(None)
            self._drop(claim)
            raise
        claim.answer.set_result(answer)
        size, keep_s = kept_as(answer)
        self._quota.grow(claim, size)
        self._quota.mark(claim, evictable=True)
        while self._quota.is_over(claim.caller) and (victim := self._quota.victim(claim.caller)) is not None:
            self._drop(victim)
        loop.call_later(keep_s, self._drop, claim)
        return answer

    def _drop(self, claim: KeptStream) -> None:
        if self._claims.get(claim.id) is claim:
            del self._claims[claim.id]
            self._quota.remove(claim)


class _Note(Struct):
    """``token``: of the request that made the claim. ``started``: None while it runs."""

    digest: str
    token: str
    started: StartedStream | None = None


async def once_of_all(
    store: StreamStore, request: Repeatable, run: Callable[[], Awaitable[StartedStream]]
) -> StartedStream:
    """Like :meth:`Repeats.once`, for all processes. Also raises UpstreamUnavailable."""
    ends, own = monotonic() + request.wait_s, _Note(request.digest, secrets.token_hex(8))
    claim, key = msgspec.json.encode(own), hashlib.sha256(request.id.encode()).hexdigest()

    async def renew() -> None:
        while True:
            await asyncio.sleep(CLAIM_S / 4)
            with suppress(GatewayError):
                await store.replace_note(key, claim, claim, CLAIM_S)

    try:
        while (known := await store.claim_note(key, claim, CLAIM_S)) is not None:
            note = msgspec.json.decode(known, type=_Note)
            request.check(note.digest)
            if note.started is not None and await store.has(note.started.id):
                return note.started
            if note.started is not None:
                await store.replace_note(key, known, b"")
            elif monotonic() >= ends:
                raise request.late
            else:
                await asyncio.sleep(POLL_S)
        renewing = asyncio.create_task(renew())
        try:
            own.started = await run()
        finally:
            renewing.cancel()
        await store.replace_note(key, claim, msgspec.json.encode(own), own.started.keep_s)
    except BaseException:
        with suppress(GatewayError):
            await store.replace_note(key, claim, b"")
        if own.started is not None:  # no client has its id, and a repeated request starts another one
            with suppress(GatewayError):
                await store.delete(own.started.id)
        raise
    return own.started


class Idempotency(Layer):
    """The answers of unary requests are kept in this process, the starts of streams where the streams are."""

    headers = ("Idempotency-Key",)
    once_header = b"idempotency-key"

    def __init__(self) -> None:
        self.answers = Repeats(ANSWER_LIMITS)
        self.starts = Repeats(START_LIMITS)

    def described(self, endpoint: Endpoint, operation: Operation) -> Operation:
        if not operation.is_repeatable:
            return operation
        parameters = [*operation.parameters, _HEADER]
        return replace(operation, parameters=parameters, errors=(*operation.errors, IdempotencyKeyReused))

    def once_of(self, exchange: Exchange, value: str) -> Once:
        """Raises InvalidRequest for a key that is empty, too long or not printable ASCII."""
        if not (0 < len(value) <= MAX_LENGTH and value.isascii() and value.isprintable()):
            text = f"Idempotency-Key must have 1 to {MAX_LENGTH} printable ASCII characters."
            raise InvalidRequest(text, hint="Use a UUID.")
        caller = exchange.record.key
        return _Once(self, exchange, caller, f"{len(caller)}:{caller}:{value}")


@dataclass(slots=True, eq=False)
class _Once(Once):
    layer: Idempotency
    exchange: Exchange
    caller: str
    id: str

    async def answer(
        self, pipeline: str, request: InferenceRequest, deadline: Deadline, run: Callable[[], Awaitable[WholeAnswer]]
    ) -> WholeAnswer:
        def digest() -> str:
            """Covers inputs and parameters. The bytes of a repeated form differ, because its boundary does."""
            found = hashlib.sha256(repr(sorted(request.parameters.items())).encode())
            for tensor in request.inputs:
                found.update(repr((tensor.name, tensor.datatype, tensor.shape)).encode())
                for element in tensor.array.flat if tensor.datatype == BYTES else [tensor.array.tobytes()]:
                    found.update(b"%d:" % len(element))
                    found.update(element)
            return found.hexdigest()

        found = await asyncio.to_thread(digest)
        late = DeadlineExceeded("The deadline passed while another request with this Idempotency-Key ran.")
        repeatable = Repeatable(f"{pipeline}:{self.id}", self.caller, found, deadline.remaining_s(), late)
        with self.exchange.cancelled_on_disconnect():
            return await self.layer.answers.once(repeatable, run, lambda answer: (len(answer.body), KEEP_S))

    async def start(
        self, store: StreamStore, body: memoryview, run: Callable[[], Awaitable[StartedStream]]
    ) -> StartedStream:
        digest = await off_loop(lambda body: hashlib.sha256(body).hexdigest(), body, self.exchange)
        late = TooManyRequests("Another request with this Idempotency-Key is starting the stream.")
        repeatable, starts = Repeatable(self.id, self.caller, digest, LONGEST_START_S, late), self.layer.starts
        with self.exchange.cancelled_on_disconnect():
            if store.is_shared:
                return await once_of_all(store, repeatable, run)
            return await starts.once(repeatable, run, lambda each: (0, each.keep_s), lambda each: store.has(each.id))
