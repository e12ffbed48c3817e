"""Prepares one start of Triton: its arguments, additions to its environment, and unique names.

The input is `EmbeddedOptions` from the caller, what the model repository on disk requires (`ServedRepository`), and the
Python environment of the models with the server of the wheel `nvidia-pytriton` inside it (`python_of_models`). The
gateway creates the environment if its own Python cannot run models. The extra `embedded` has uv for this. A checkout
has its own setup, `deploy/bootstrap.py`.
"""

import os
import random
import secrets
import shlex
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.launcher.machine import (
    NAMES,
    REQUEST,
    EmbeddedTritonError,
    Interpreter,
    Machine,
    RepositoryUnservable,
    candidates,
    choose,
    inspect,
    reason_of,
    refusal,
    refusals,
)

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
        """Raises `EmbeddedTritonError` for the first port that cannot be bound."""
        for name, port in (("gRPC", self.grpc), ("HTTP", self.http), ("metrics", self.metrics)):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as exc:
                    message = f"Port {port}, meant for Triton's {name}, is in use by another process."
                    raise EmbeddedTritonError(message) from exc


@dataclass(frozen=True)
class ServedRepository:
    """What a model repository on disk requires of the server.

    The models of the repository, and whether Triton may skip the slow auto-completion of their configurations.
    ``refused``: why other models are not loaded, by name.
    """

    path: Path
    models: tuple[str, ...]
    is_complete: bool
    refused: Mapping[str, str] = field(default_factory=dict)


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


PACKAGES = "'numpy<2' 'nvidia-pytriton==0.7.0'"
"""The packages that an environment needs to run Triton and Python models, as arguments of pip."""


def python_of_models(venv: Path) -> Interpreter:
    """Examines `venv`. Raises `EmbeddedTritonError` with a remedy if Triton and its Python models cannot run there."""
    python = inspect(venv / "bin" / "python3")
    if python is None:
        raise EmbeddedTritonError(
            f"There is no Python environment for the models in {venv}. In a checkout, `make run` makes one, and so "
            "does `pip install '.[embedded]'` with the next start. Elsewhere, with Python 3.10 to 3.12: "
            f"`python3 -m venv .venv-triton && .venv-triton/bin/pip install {PACKAGES}`."
        )
    if not python.runs_models:
        by_extra = "With `pip install '.[embedded]'` the gateway installs one itself."
        raise EmbeddedTritonError(f"{refusal(python.path)} {by_extra}")
    problems, numpy = [], python.numpy
    if numpy is None:
        problems.append("it has no numpy")
    elif int(numpy.partition(".")[0]) >= 2:
        problems.append(
            f"it has numpy {numpy}, and Triton's Python backend silently corrupts tensors with numpy 2 or newer"
        )
    if python.server is None:
        problems.append("it does not hold the wheel nvidia-pytriton")
    if problems:
        raise EmbeddedTritonError(
            f"The models' environment of {python.path} is not complete: {', and '.join(problems)}. "
            f"Run `{python.path} -m pip install {PACKAGES}`. In a checkout, `make run` makes an environment "
            "for the models."
        )
    return python


def link_backends(python: Interpreter, folder: Path) -> None:
    """Creates symbolic links to the wheel's Python backend in `folder`, in the layout that Triton expects.

    The module of the backend that every model imports imports `model_output.py` here too.
    """
    backend, server = folder / "python", Path(python.server or "")
    backend.mkdir(parents=True)
    stub = server / "python_backend_stubs" / "{}.{}".format(*python.version)
    for source in (*(server / "backends" / "python").iterdir(), *stub.iterdir()):
        (backend / source.name).symlink_to(source)
    utilities = backend / "triton_python_backend_utils.py"
    text = utilities.read_text()
    utilities.unlink()
    utilities.write_text(f"{text}\nimport {MODEL_OUTPUT.stem}\n")
    (backend / MODEL_OUTPUT.name).symlink_to(MODEL_OUTPUT)


MODEL_OUTPUT = Path(__file__).with_name("model_output.py").resolve()

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
    python: Interpreter
    nonce: str
    folder: Path

    @classmethod
    def prepare(cls, options: EmbeddedOptions, ports: Ports) -> "Launch":
        """Examines the repository, the environment and the ports, and creates the folder with Triton's backends.

        Raises EmbeddedTritonError, also if the file system for temporary files is full.
        """
        repository, python = options.read(options.repository), python_of_models(options.venv)
        ports.require_free(options.host)
        folder = None
        try:
            temporary = tempfile.gettempdir()
            parent = temporary if _is_one_word(temporary) else "/tmp"
            folder = Path(tempfile.mkdtemp(prefix="triton-gateway-", dir=parent))
            link_backends(python, folder)
            if not _is_one_word(str(repository.path)):
                (folder / "models").symlink_to(repository.path)
                repository = replace(repository, path=folder / "models")
        except OSError as exc:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            where = exc.filename or "the folder for temporary files"
            text = f"Triton cannot start: {where}: {exc.strerror}. Free space there, or set TMPDIR to another folder."
            raise EmbeddedTritonError(text) from exc
        return cls(options, ports, repository, python, secrets.token_hex(8), folder)

    @property
    def shm_prefix(self) -> str:
        """The unique prefix of the names of all shared-memory regions of this start."""
        return f"triton_gateway_{self.nonce}_"

    def command(self) -> list[str]:
        """The command line of `tritonserver`."""
        options = self.options
        arguments = [
            f"{self.python.server}/bin/tritonserver",
            f"--id={self.nonce}",
            f"--model-repository={self.repository.path}",
            f"--backend-directory={self.folder}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in self.repository.models),
            "--exit-on-error=false",
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
        inherited, python = self.options.environment, self.python
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


def needs_environment(gateway: Path) -> bool:
    """Whether the environment `gateway` has uv, but its Python cannot run models. False where Triton cannot run."""
    python = inspect(gateway / "bin" / "python3")
    return _path_of_uv().exists() and not (python and python.runs_models) and not refusals(Machine.here())


def create_environment(venv: Path) -> None:
    """Creates `venv` with a Python of this machine or one that uv installs. Raises `EmbeddedTritonError`."""
    found = choose(candidates(NAMES, os.environ))
    python = ["--python", str(found.path)] if found else ["--python", REQUEST, "--managed-python"]
    try:
        if stderr := _stderr_of_uv("venv", *python, str(venv)):
            raise EmbeddedTritonError(f"{refusal(None)}\n{reason_of(stderr)}")
        if stderr := _stderr_of_uv("pip", "install", "--no-deps", "--python", str(venv), "pip", *shlex.split(PACKAGES)):
            raise EmbeddedTritonError(f"The models' environment {venv} could not be installed:\n{stderr}")
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise


REQUIREMENTS = "requirements.txt"
"""The file of a model repository that names the packages of its models."""


def install_requirements(venv: Path, repository: Path) -> None:
    """Installs the packages of the repository's models into their environment. Raises `EmbeddedTritonError`.

    Other packages stay. A numpy that the Python backend misreads is refused.
    """
    requirements = repository / REQUIREMENTS
    if not requirements.is_file():
        return
    arguments = ["--requirement", str(requirements), shlex.split(PACKAGES)[0]]
    if _path_of_uv().exists():
        stderr = _stderr_of_uv("pip", "install", "--python", str(venv), *arguments)
    else:
        stderr = _stderr_of(str(venv / "bin" / "python3"), "-m", "pip", "install", *arguments, "--quiet")
    if stderr:
        raise EmbeddedTritonError(f"The packages of {requirements} could not be installed into {venv}:\n{stderr}")


def _stderr_of_uv(*arguments: str) -> str | None:
    return _stderr_of(str(_path_of_uv()), *arguments, "--quiet")


def _stderr_of(*command: str) -> str | None:
    """Runs a command. Returns None after success."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip() or f"{command[0]} failed" if done.returncode else None


def _path_of_uv() -> Path:
    return Path(sysconfig.get_path("scripts")) / "uv"
