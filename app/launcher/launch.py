"""Prepares one start of Triton: its arguments, additions to its environment, and unique names.

The input is `EmbeddedOptions` from the caller, and what the model repository on disk requires: `ServedRepository`.
"""

import os
import random
import secrets
import shlex
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.launcher.machine import RepositoryUnservable, StartFailed, TritonPortTaken
from app.launcher.models_venv import ModelEnvironment

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Below Linux's default range for outgoing connections, which could take a port before Triton binds it."""


@dataclass(frozen=True)
class Ports:
    """The three ports of one server, on a loopback address."""

    grpc: int
    http: int
    metrics: int

    @classmethod
    def free(cls, host: str = LOOPBACK) -> "Ports":
        """Finds three ports of the address that are free now: of `PORTS`, or others if all that are tried are taken."""
        ports = []
        with ExitStack() as held:
            for _ in range(3):
                each = held.enter_context(socket.socket())
                for port in (*random.sample(PORTS, 100), 0):
                    with suppress(OSError):
                        each.bind((host, port))
                        break
                ports.append(each.getsockname()[1])
        return cls(*ports)

    def require_free(self, host: str) -> None:
        """Raises `TritonPortTaken` for the first port that cannot be bound."""
        for name, port in (("gRPC", self.grpc), ("HTTP", self.http), ("metrics", self.metrics)):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as exc:
                    message = f"Port {port}, meant for Triton's {name}, is in use by another process."
                    raise TritonPortTaken(message) from exc


@dataclass(frozen=True)
class ServedRepository:
    """What a model repository on disk requires of the server.

    The models of the repository, and whether Triton may skip the slow auto-completion of their configurations.
    """

    path: Path
    models: tuple[str, ...]
    is_complete: bool


def every_folder(path: Path) -> ServedRepository:
    """Each folder is a model, whose configuration Triton may have to complete. Raises `RepositoryUnservable`."""
    names = sorted(each.name for each in path.iterdir() if each.is_dir()) if path.is_dir() else []
    if not names:
        raise RepositoryUnservable(f"There are no models in {path}.")
    return ServedRepository(path.resolve(), tuple(names), is_complete=False)


@dataclass(frozen=True)
class EmbeddedOptions:
    """Options of the embedded Triton: the repository, the Python environment of the models, and time limits.

    `host` is a loopback address. Without `ports`, free ports are chosen at the first start and reused by restarts.
    Triton and the models inherit `environment`. Triton sends its spans to `traces_url` with OTLP over HTTP, every
    `traces_delay_ms`; None: Triton's default, 5 s, or `OTEL_BSP_SCHEDULE_DELAY`.
    `exit_timeout_s` leaves room for many models: those of this repository need 5 to 8 s on two cores, and a limit that
    is too short makes Triton log an error. `arguments` are added to Triton's command line. `read` examines the
    repository before each start, and raises `RepositoryUnservable`.
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
    read: Callable[[Path], ServedRepository] = every_folder


# Without these arguments Triton answers the engine's frequent keepalive pings with GOAWAY (too_many_pings).
_KEEPALIVE = (
    "--grpc-http2-min-recv-ping-interval-without-data=200",
    "--grpc-http2-max-ping-strikes=0",
    "--grpc-keepalive-permit-without-calls=1",
)
# Triton starts its own trace for one request in this many. Requests with a parent span are always recorded.
_ONLY_WITH_PARENT = 2**31 - 1
# Many model processes share the cores. A thread pool in each process would slow down all of them.
_THREAD_COUNTS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The memory of a large tensor is kept for the next one. Otherwise glibc often returns it to the system, and each new
# page costs as much as the copy into it. glibc itself sets these values after a block of 32 MiB. Source: mallopt(3).
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}


@dataclass(frozen=True)
class Launch:
    """The parameters of one start. Triton reports `nonce` as its name, which identifies the server on the port."""

    options: EmbeddedOptions
    ports: Ports
    repository: ServedRepository
    models: ModelEnvironment
    nonce: str
    folder: Path

    @classmethod
    def prepare(
        cls, options: EmbeddedOptions, ports: Ports, repository: ServedRepository, models: ModelEnvironment
    ) -> "Launch":
        """Chooses the names and creates the temporary folder with Triton's backends.

        Raises StartFailed if its file system is full.
        """
        folder = None
        try:
            temporary = tempfile.gettempdir()
            parent = temporary if _is_one_word(temporary) else "/tmp"
            folder = Path(tempfile.mkdtemp(prefix="triton-gateway-", dir=parent))
            models.link_backends(folder)
            if not _is_one_word(str(repository.path)):
                (folder / "models").symlink_to(repository.path)
                repository = replace(repository, path=folder / "models")
        except OSError as exc:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            where = exc.filename or "the folder for temporary files"
            text = f"Triton cannot start: {where}: {exc.strerror}. Free space there, or set TMPDIR to another folder."
            raise StartFailed(text) from exc
        return cls(options, ports, repository, models, secrets.token_hex(8), folder)

    @property
    def shm_prefix(self) -> str:
        """The unique prefix of the names of all shared-memory regions of this start."""
        return f"triton_gateway_{self.nonce}_"

    @property
    def grace_s(self) -> float:
        """Time for Triton to exit before it is killed: its own exit timeout and a margin."""
        return self.options.exit_timeout_s + 2.0

    def command(self) -> list[str]:
        """The command line of `tritonserver`."""
        options = self.options
        arguments = [
            str(self.models.executable),
            f"--id={self.nonce}",
            f"--model-repository={self.repository.path}",
            f"--backend-directory={self.folder}",
            "--model-control-mode=explicit",
            "--load-model=*",
            # A model process that cannot start would delay loading by 30 s.
            "--backend-config=python,stub-timeout-seconds=10",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--exit-timeout-secs={options.exit_timeout_s}",
            *_KEEPALIVE,
        ]
        if self.repository.is_complete:
            arguments.append("--disable-auto-complete-config")
        for service, port in vars(self.ports).items():
            arguments += (f"--{service}-address={options.host}", f"--{service}-port={port}")
        if options.traces_url is not None:
            arguments += (
                "--trace-config=mode=opentelemetry",
                f"--trace-config=opentelemetry,url={options.traces_url}",
                "--trace-config=level=TIMESTAMPS",
                f"--trace-config=rate={_ONLY_WITH_PARENT}",
            )
            if options.traces_delay_ms is not None:
                arguments.append(f"--trace-config=opentelemetry,bsp_schedule_delay={options.traces_delay_ms}")
        return [*arguments, *options.arguments]

    def environment(self) -> dict[str, str]:
        """Additions to the inherited environment. Model processes run the first `python3` on PATH."""
        inherited, python = self.options.environment, self.models.python
        added = {name: value for name, value in (_THREAD_COUNTS | _KEPT_MEMORY).items() if name not in inherited}
        first = {"PATH": str(python.path.parent), "LD_LIBRARY_PATH": python.library_folder}
        for name, folder in first.items():
            if folder:
                rest = inherited.get(name, os.defpath if name == "PATH" else "")
                added[name] = f"{folder}{os.pathsep}{rest}" if rest else folder
        return added


def _is_one_word(path: str) -> bool:
    """Whether Triton can use the path: its Python backend inserts paths without quotes into a command of bash."""
    return shlex.quote(path) == path
