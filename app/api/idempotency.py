"""``Idempotency-Key``: a repeated request gets the first answer again (decision 0052)."""

from app.api.exchange import Exchange
from app.domain.errors import InvalidRequest

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
