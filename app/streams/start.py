"""The start of a stream with an idempotency key: repeated starts return the same stream."""

from dataclasses import dataclass

from app.domain.errors import IdempotencyKeyReused, TooManyRequests

LONGEST_START_S = 30.0
"""How long a repeated start waits for the first one, which may wait for a slot of its model."""


@dataclass(frozen=True, slots=True)
class StartKey:
    """``caller``: the id of the API key; empty without one. ``digest``: of the body, to recognize another request."""

    caller: str
    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class StartedStream:
    id: str
    request_id: str


def key_reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        "This Idempotency-Key was sent with another body.", hint="Use a new key, such as a UUID, for each new request."
    )


def start_in_progress() -> TooManyRequests:
    return TooManyRequests("Another request with this Idempotency-Key is starting the stream.")
