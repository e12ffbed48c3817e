"""Which process has a session: the session's id says so."""

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from app.core.errors import MisdirectedSession, SessionLost, UnknownSession

_TAG_DIGITS = 8
_MOST_DIGITS = 4
_OWNER = re.compile(rf"([a-z0-9-]{{1,32}})\.([0-9]+)\.[0-9a-f]{{{_TAG_DIGITS}}}\.")


@dataclass(frozen=True)
class SessionHome:
    """This process: a worker of a gateway.

    ``gateway``: the name of the gateway in the ids, which proxies route by. It is the same for all workers.
    ``process``: another one for each process, so that a worker does not take the sessions of the one that it replaces
    for its own.
    """

    gateway: str = "0" * _TAG_DIGITS
    number: int = 1
    workers: int = 1
    process: str = field(default_factory=lambda: secrets.token_hex(_TAG_DIGITS // 2))

    @classmethod
    def at(cls, host: str, port: int, number: int = 1, workers: int = 1) -> Self:
        """A gateway without a name. ``host``: of the machine or pod. ``port``: where the gateway listens."""
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
        return self._own + secrets.token_urlsafe(16)

    @cached_property
    def _own(self) -> str:
        """The beginning of the ids of this process."""
        return f"{self.gateway}.{self.number}.{self.process}."

    def owner_of(self, session_id: str) -> int:
        """The number of the worker that has the session.

        Raises UnknownSession, MisdirectedSession, or SessionLost if the process that had the session has ended.
        """
        if session_id.startswith(self._own):
            return self.number
        found = _OWNER.match(session_id)
        if found is None:
            raise UnknownSession("There is no such session.")
        gateway, number = found.groups()
        if gateway != self.gateway:
            raise MisdirectedSession("Another gateway has this session, or had it until it ended.")
        is_worker = len(number) <= _MOST_DIGITS and 1 <= int(number) <= self.workers
        if not is_worker or int(number) == self.number:
            raise SessionLost("The process that had the session has ended.")
        return int(number)
