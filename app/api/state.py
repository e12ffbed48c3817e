"""The limits that the routes share, and what the middleware leaves in a request's state."""

from dataclasses import dataclass
from typing import cast

from starlette.requests import HTTPConnection

from app.api.workload import RequestWork
from app.observability.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    max_bytes_in_flight: int = 256 * 1024 * 1024
    """For the bodies of all requests together."""
    body_s: float = 30.0
    """For the whole body to arrive."""
    ping_s: float = 15.0
    send_s: float = 10.0
    """For a client to take what is sent to it."""


def record_of(connection: HTTPConnection) -> RequestRecord:
    return cast("RequestRecord", connection.scope["state"]["record"])


def work_of(connection: HTTPConnection) -> RequestWork:
    return cast("RequestWork", connection.scope["state"]["work"])
