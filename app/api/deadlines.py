"""Reads the deadline from a request; the pipeline's deadline is the upper limit."""

import math

from app.api.exchange import Exchange
from app.core.errors import InvalidRequest
from app.core.inference import Deadline

HEADER = b"x-request-timeout"


def deadline_of(exchange: Exchange, timeout_s: float) -> Deadline:
    """Returns the request's deadline. Raises InvalidRequest if ``X-Request-Timeout`` is not a positive number."""
    text = exchange.header(HEADER)
    if text is None:
        return Deadline.after(timeout_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest("X-Request-Timeout is not a positive number of seconds.")
    return Deadline.after(min(seconds, timeout_s))
