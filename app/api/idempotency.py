"""``Idempotency-Key``: a repeated unary request gets the first answer, from the memory of this process (decision 7)."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.api.exchange import Exchange, Header
from app.core.errors import DeadlineExceeded, InvalidRequest
from app.core.inference import BYTES, Deadline, InferenceRequest
from app.core.repeats import MemoryRepeats, RepeatKey
from app.streams.quota import KeepLimits, KeepQuota, KeptStream

HEADER = b"idempotency-key"
MAX_LENGTH = 255


def idempotency_key_of(exchange: Exchange) -> str | None:
    """Raises InvalidRequest for a key that is empty, too long or not printable ASCII."""
    key = exchange.header(HEADER)
    if key is not None and not (0 < len(key) <= MAX_LENGTH and key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {MAX_LENGTH} printable ASCII characters.", hint="Use a UUID."
        )
    return key


KEEP_S = 60.0
LIMITS = KeepLimits(16 * 1024 * 1024, 4096)
"""For all answers together; one API key may use half. The oldest answers are dropped first."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    body: bytes
    headers: Sequence[Header]
    early_exit: str | None


class KeptAnswers(MemoryRepeats[KeptAnswer]):
    def __init__(self, limits: KeepLimits = LIMITS) -> None:
        super().__init__()
        self._quota = KeepQuota(limits)
        self._kept: dict[KeptStream, RepeatKey] = {}

    async def once(self, key: RepeatKey, deadline: Deadline, run: Callable[[], Awaitable[KeptAnswer]]) -> KeptAnswer:
        """Returns the answer of the first request with this key, if it is kept or still runs; else that of ``run``.

        Errors are not kept. Raises IdempotencyKeyReused, DeadlineExceeded, and the errors of ``run``.
        """
        late = DeadlineExceeded("The deadline passed while another request with this Idempotency-Key ran.")
        known = await self.claim(key, deadline.remaining_s(), late)
        if known is not None:
            return known
        try:
            answer = await run()
        except BaseException:
            await self.release(key)
            raise
        self.keep(key, answer)
        kept = KeptStream("", key.caller)
        kept.size += len(answer.body)
        self._kept[kept] = key
        self._quota.add(kept)
        self._quota.mark(kept, evictable=True)
        while self._quota.is_over(key.caller) and (victim := self._quota.victim(key.caller)) is not None:
            self._drop(victim)
        asyncio.get_running_loop().call_later(KEEP_S, self._drop, kept)
        return answer

    def _drop(self, kept: KeptStream) -> None:
        key = self._kept.pop(kept, None)
        if key is not None:
            self._quota.remove(kept)
            self.forget(key)


def digest_of(request: InferenceRequest) -> str:
    """A digest of the inputs and parameters. The bytes of a repeated form differ, because its boundary does."""
    digest = hashlib.sha256(repr(sorted(request.parameters.items())).encode())
    for tensor in request.inputs:
        digest.update(repr((tensor.name, tensor.datatype, tensor.shape)).encode())
        if tensor.datatype != BYTES:
            digest.update(tensor.array.tobytes())
            continue
        for element in tensor.array.flat:
            digest.update(b"%d:" % len(element))
            digest.update(element)
    return digest.hexdigest()
