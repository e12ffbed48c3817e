"""Answers a request with an ``Idempotency-Key`` that was sent before as it was answered then."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from app.api.bodies import off_loop
from app.api.endpoint import Endpoint
from app.api.error_table import ErrorRow, add_rows
from app.api.exchange import CancelledOnDisconnect, Exchange
from app.api.idempotency.repeats import IdempotencyKeyReused, Repeatable, Repeats, once_of_all
from app.api.openapi import Operation, header
from app.api.request_layer import KeptAnswer, Layer, Once
from app.core.errors import DeadlineExceeded, InvalidRequest, TooManyRequests
from app.core.inference import BYTES, Deadline, InferenceRequest
from app.streams.quota import KeepLimits
from app.streams.store import StartedStream, StreamStore

HEADER = b"idempotency-key"
MAX_LENGTH = 255
KEEP_S = 60.0
ANSWER_LIMITS = KeepLimits(16 * 1024 * 1024, 4096)
START_LIMITS = KeepLimits(max_streams=100_000, max_bytes=2**62)
LONGEST_START_S = 30.0
"""How long a repeated start waits for the first one, which may wait for a slot of its model."""

add_rows(
    {
        IdempotencyKeyReused: ErrorRow(
            422,
            "The Idempotency-Key was sent before, with another body, and the first answer is still kept.",
            "Use a new key for each new request, and the same key only to repeat one.",
        )
    }
)
_HEADER = header(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH, "pattern": "^[ -~]+$"},
    "A unique key, such as a UUID: a repeated request with the same body gets the first answer again.",
)


class Idempotency(Layer):
    """The answers of unary requests are kept in this process, the starts of streams where the streams are."""

    headers = ("Idempotency-Key",)

    def __init__(self) -> None:
        self.answers = Repeats(ANSWER_LIMITS)
        self.starts = Repeats(START_LIMITS)

    def described(self, endpoint: Endpoint, operation: Operation) -> Operation:
        if not operation.is_repeatable:
            return operation
        parameters = [*operation.parameters, _HEADER]
        return replace(operation, parameters=parameters, errors=(*operation.errors, IdempotencyKeyReused))

    def once_of(self, exchange: Exchange) -> Once | None:
        """Raises InvalidRequest for a key that is empty, too long or not printable ASCII."""
        key = exchange.header(HEADER)
        if key is None:
            return None
        if not (0 < len(key) <= MAX_LENGTH and key.isascii() and key.isprintable()):
            text = f"Idempotency-Key must have 1 to {MAX_LENGTH} printable ASCII characters."
            raise InvalidRequest(text, hint="Use a UUID.")
        return _Once(self, exchange, key)


class _Once(Once):
    def __init__(self, layer: Idempotency, exchange: Exchange, key: str) -> None:
        self._layer = layer
        self._exchange = exchange
        self._key = key

    async def answer(
        self, pipeline: str, request: InferenceRequest, deadline: Deadline, run: Callable[[], Awaitable[KeptAnswer]]
    ) -> KeptAnswer:
        name, digest = (self._exchange.record.key, self._key, pipeline), await asyncio.to_thread(digest_of, request)
        late = DeadlineExceeded("The deadline passed while another request with this Idempotency-Key ran.")
        repeatable = Repeatable(name, digest, deadline.remaining_s(), late)
        with CancelledOnDisconnect(self._exchange):
            return await self._layer.answers.once(
                repeatable, run, is_kept=_always, kept_as=lambda answer: (len(answer.body), KEEP_S)
            )

    async def start(
        self, store: StreamStore, body: memoryview, run: Callable[[], Awaitable[StartedStream]]
    ) -> StartedStream:
        digest = await off_loop(lambda body: hashlib.sha256(body).hexdigest(), body, self._exchange)
        late = TooManyRequests("Another request with this Idempotency-Key is starting the stream.")
        repeatable = Repeatable((self._exchange.record.key, self._key, ""), digest, LONGEST_START_S, late)
        with CancelledOnDisconnect(self._exchange):
            return await self._layer.starts.once(
                repeatable,
                run if store.notes is None else partial(once_of_all, store.notes, store, repeatable, run),
                is_kept=lambda started: store.has(started.id),
                kept_as=None if store.notes is not None else lambda started: (0, started.keep_s),
            )


async def _always(_answer: object) -> bool:
    return True


def digest_of(request: InferenceRequest) -> str:
    """A digest of the inputs and parameters. The bytes of a repeated form differ, because its boundary does."""
    digest = hashlib.sha256(repr(sorted(request.parameters.items())).encode())
    for tensor in request.inputs:
        digest.update(repr((tensor.name, tensor.datatype, tensor.shape)).encode())
        elements = tensor.array.flat if tensor.datatype == BYTES else [tensor.array.tobytes()]
        for element in elements:
            digest.update(b"%d:" % len(element))
            digest.update(element)
    return digest.hexdigest()
