"""Which process has a session: the session's id says so."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Self

from app.core.errors import MisdirectedSession, UnknownSession

_TAG_DIGITS = 8
_MOST_DIGITS = 4


@dataclass(frozen=True, slots=True)
class SessionHome:
    """This process: a worker of a gateway. ``gateway``: the same for all workers, and another one for each gateway."""

    gateway: str = "0" * _TAG_DIGITS
    number: int = 1
    workers: int = 1

    @classmethod
    def at(cls, host: str, port: int, number: int = 1, workers: int = 1) -> Self:
        """``host``: the name of the machine or pod. ``port``: where the gateway listens."""
        return cls(hashlib.sha256(f"{host}:{port}".encode()).hexdigest()[:_TAG_DIGITS], number, workers)

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(1, self.workers + 1) if number != self.number]

    def socket_of(self, number: int) -> str:
        """The abstract Unix socket at which a worker serves the others (unix(7)). It needs no file system."""
        return f"\0triton-gateway-sessions-{self.gateway}-{number}"

    def new_id(self) -> str:
        """Has 128 random bits. A session id is a bearer capability: whoever has it can run steps."""
        return f"{self.gateway}.{self.number}.{secrets.token_urlsafe(16)}"

    def owner_of(self, session_id: str) -> int:
        """The number of the worker that has the session. Raises UnknownSession or MisdirectedSession."""
        gateway, _, rest = session_id.partition(".")
        number = rest.partition(".")[0]
        if not (number.isascii() and number.isdecimal() and len(gateway) == _TAG_DIGITS):
            raise UnknownSession("There is no such session.")
        if gateway != self.gateway or len(number) > _MOST_DIGITS or not 1 <= int(number) <= self.workers:
            raise MisdirectedSession("Another gateway has this session, or had it until it ended.")
        return int(number)
