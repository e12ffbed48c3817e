"""The socket between the supervisor and one worker, and its messages."""

import asyncio
import pickle
import socket
from dataclasses import dataclass, field
from typing import Any

from app.observability.explain.request import Found
from app.observability.statistics import Statistics
from app.observability.worker_metrics import Descriptors
from app.process.tritons import Triton
from app.settings import Settings
from app.triton.health.health import Faults, Observed

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message of the supervisor: everything that a worker needs to start. Descriptors are inherited."""

    number: int
    """The worker's number, from 1, used in the log and in the readiness."""
    settings: Settings
    """With this worker's share of each limit."""
    triton: Triton
    admin_port: int
    listeners: list[int]
    """The sockets of all workers, in the order of their numbers."""
    metrics: Descriptors
    log_lock: int
    supervisor: int
    """Its process id."""


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """The supervisor's message to a worker, sent whenever it changes."""

    listens_on: frozenset[int]
    """Numbers of workers: its own, and those that currently do not accept connections."""
    faults: dict[str, Faults] = field(default_factory=dict)
    """By address of the Triton."""


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's message, sent several times a second. The first one means that the worker accepts connections."""

    is_ready: bool
    observed: dict[str, Observed] = field(default_factory=dict)
    """By address of the Triton."""


@dataclass(frozen=True, slots=True)
class StatisticsWanted:
    """A worker's question, sent only if a caller asks for the statistics."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The supervisor's answer to :class:`StatisticsWanted`."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class ExplanationWanted:
    """A worker's question for an explained request, because another worker may have served it."""

    number: int
    """Of the question, among those of this worker."""
    owner: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ExplanationFound:
    """The supervisor's answer to the question with this number."""

    number: int
    found: Found | None


class Channel:
    """Messages are pickled, because both ends are this program and no other process can reach the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> "Channel":
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        """Never blocks. A message for a process that has ended is dropped."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> Any:
        """Raises EOFError if the other process has ended."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise EOFError from exc

    def close(self) -> None:
        self._writer.close()
