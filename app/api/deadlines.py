"""The deadline that a caller asks for, capped by the pipeline's."""

import math

from starlette.requests import Request

from app.domain.deadline import Deadline
from app.domain.errors import InvalidRequest

HEADER = "x-request-timeout"


def deadline_of(request: Request, timeout_s: float) -> Deadline:
    """Raises InvalidRequest where ``X-Request-Timeout`` is not a positive number of seconds."""
    asked = request.headers.get(HEADER)
    if asked is None:
        return Deadline.after(timeout_s)
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest("X-Request-Timeout is not a positive number of seconds.")
    return Deadline.after(min(seconds, timeout_s))
