"""Options of the embedded Triton."""

import os
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.triton.embedded.errors import PortTaken

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Below Linux's default range for outgoing connections, which could take a port before Triton binds it."""


def bind_to_free_port(to_bind: socket.socket, host: str) -> int:
    """Binds to a random free port of `PORTS`, or of any range if all that are tried are taken. Returns the port."""
    for port in random.sample(PORTS, 100):
        with suppress(OSError):
            to_bind.bind((host, port))
            return port
    to_bind.bind((host, 0))
    return int(to_bind.getsockname()[1])


@dataclass(frozen=True)
class Ports:
    """The three ports of one server, on a loopback address."""

    grpc: int
    http: int
    metrics: int

    @classmethod
    def free(cls, host: str = LOOPBACK) -> "Ports":
        """Finds three ports of the address that are free now."""
        with ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(3)]
            return cls(*(bind_to_free_port(each, host) for each in sockets))

    def require_free(self, host: str = LOOPBACK) -> None:
        """Raises `PortTaken` for the first port that cannot be bound."""
        for name, port in (("gRPC", self.grpc), ("HTTP", self.http), ("metrics", self.metrics)):
            _require_free(name, host, port)


def _require_free(name: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PortTaken(f"Port {port}, meant for Triton's {name}, is in use by another process.") from exc


@dataclass(frozen=True)
class EmbeddedOptions:
    """The repository, the Python environment of the models, and time limits.

    `host` is a loopback address. Without `ports`, free ports are chosen at the first start and reused by restarts.
    Triton and the models inherit `environment`. Triton sends its spans to `traces_url` with OTLP over HTTP, every
    `traces_delay_ms`; None: Triton's default, 5 s, or `OTEL_BSP_SCHEDULE_DELAY`.
    `exit_timeout_s` leaves room for many models: those of this repository need 5 to 8 s on two cores, and a limit that
    is too short makes Triton log an error. `arguments` are added to Triton's command line.
    """

    repository: Path
    venv: Path
    ports: Ports | None = None
    host: str = LOOPBACK
    traces_url: str | None = None
    traces_delay_ms: int | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    start_timeout_s: float = 300.0
    exit_timeout_s: int = 15
    arguments: tuple[str, ...] = ()
    first_restart_s: float = 0.5
    longest_restart_s: float = 30.0
