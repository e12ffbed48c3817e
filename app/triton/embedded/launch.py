"""One start of Triton: its arguments, additions to its environment, and unique names."""

import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from app.triton.embedded.errors import StartFailed
from app.triton.embedded.options import EmbeddedOptions, Ports
from app.triton.embedded.served_repository import ServedRepository
from app.triton.embedded.wheel import ModelEnvironment

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
        """Chooses the names and creates the temporary folder with Triton's backends. Raises StartFailed."""
        with _new_temporary_folder() as folder:
            models.link_backends(folder)
            if not _is_one_word(str(repository.path)):
                (folder / "models").symlink_to(repository.path)
                repository = replace(repository, path=folder / "models")
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
        return [
            str(self.models.executable),
            f"--id={self.nonce}",
            *self._model_arguments(),
            *self._address_arguments(),
            *_KEEPALIVE,
            *self._trace_arguments(),
            f"--exit-timeout-secs={self.options.exit_timeout_s}",
            *self.options.arguments,
        ]

    def environment(self) -> dict[str, str]:
        """Additions to the inherited environment. Model processes run the first `python3` on PATH."""
        inherited = self.options.environment
        return {
            **{name: value for name, value in (_THREAD_COUNTS | _KEPT_MEMORY).items() if name not in inherited},
            "PATH": _joined(str(self.models.python.path.parent), inherited.get("PATH", os.defpath)),
            **_library_path(self.models.python.library_folder, inherited),
        }

    def _model_arguments(self) -> Iterator[str]:
        yield f"--model-repository={self.repository.path}"
        yield f"--backend-directory={self.folder}"
        yield "--model-control-mode=explicit"
        yield "--load-model=*"
        # A model process that cannot start would delay loading by 30 s.
        yield "--backend-config=python,stub-timeout-seconds=10"
        yield f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}"
        if self.repository.is_complete:
            yield "--disable-auto-complete-config"

    def _address_arguments(self) -> Iterator[str]:
        for service in ("grpc", "http", "metrics"):
            yield f"--{service}-address={self.options.host}"
            yield f"--{service}-port={getattr(self.ports, service)}"

    def _trace_arguments(self) -> Iterator[str]:
        if self.options.traces_url is None:
            return
        yield "--trace-config=mode=opentelemetry"
        yield f"--trace-config=opentelemetry,url={self.options.traces_url}"
        if self.options.traces_delay_ms is not None:
            yield f"--trace-config=opentelemetry,bsp_schedule_delay={self.options.traces_delay_ms}"
        yield "--trace-config=level=TIMESTAMPS"
        yield f"--trace-config=rate={_ONLY_WITH_PARENT}"


@contextmanager
def _new_temporary_folder() -> Iterator[Path]:
    """Creates a folder, which is removed if the block fails. Raises StartFailed if its file system is full."""
    folder = None
    try:
        temporary = tempfile.gettempdir()
        parent = temporary if _is_one_word(temporary) else "/tmp"
        folder = Path(tempfile.mkdtemp(prefix="triton-gateway-", dir=parent))
        yield folder
    except OSError as exc:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        where = exc.filename or "the folder for temporary files"
        raise StartFailed(
            f"Triton cannot start: {where}: {exc.strerror}. Free space there, or set TMPDIR to another folder."
        ) from exc


def _is_one_word(path: str) -> bool:
    """Whether Triton can use the path: its Python backend inserts paths without quotes into a command of bash."""
    return shlex.quote(path) == path


def _library_path(folder: str | None, inherited: Mapping[str, str]) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": _joined(folder, inherited.get("LD_LIBRARY_PATH", ""))} if folder else {}


def _joined(first: str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first
