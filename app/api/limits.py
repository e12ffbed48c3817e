"""The limits that the routes share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    max_bytes_in_flight: int = 256 * 1024 * 1024
    """Limit for the bodies of all requests together."""
    body_s: float = 30.0
    """Time limit for the whole body to arrive."""
    ping_s: float = 15.0
    send_s: float = 10.0
    """Time limit for a client to make progress with reading."""
