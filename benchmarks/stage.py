"""The servers of a benchmark: a real gateway, and a real Triton with the reference models and additional models."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import np_to_triton_dtype

from app.launcher.launch import EmbeddedOptions, bind_to_free_port
from app.launcher.server import EmbeddedTriton
from app.triton.repository import served_repository

HERE = Path(__file__).parent
ROOT = HERE.parent
START_S = 60.0
CALL_S = 60.0
STOP_S = 5.0

Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Triton:
    """A Triton. ``client`` is NVIDIA's client, so that direct calls use no code of this project."""

    pid: int
    grpc_url: str
    http_url: str
    metrics_url: str
    client: InferenceServerClient

    async def infer(self, model: str, inputs: Inputs, **parameters: object) -> Any:
        """Makes one unary call. Raises InferenceServerException."""
        tensors = [_tensor(name, array) for name, array in inputs.items()]
        return await self.client.infer(model, tensors, parameters=parameters or None, client_timeout=CALL_S)

    async def executions(self, *models: str) -> list[int]:
        """Returns the number of executions of each model so far."""
        async with httpx.AsyncClient() as session:
            lines = (await session.get(self.metrics_url)).text.splitlines()
        return [_counter(lines, f'nv_inference_exec_count{{model="{model}"') for model in models]


@dataclass(frozen=True)
class Gateway:
    client: httpx.AsyncClient
    url: str
    admin_url: str
    pid: int

    async def post(self, pipeline: str, **fields: object) -> Any:
        """Returns the answer to a JSON body. Raises an exception if the status is not 200."""
        return (await self.client.post(f"/v1/pipelines/{pipeline}", json=fields)).raise_for_status().json()

    async def post_file(self, pipeline: str, **files: bytes) -> Any:
        """Returns the answer to a form with files. Raises an exception if the status is not 200."""
        return (await self.client.post(f"/v1/pipelines/{pipeline}", files=files)).raise_for_status().json()


@dataclass(frozen=True)
class Stage:
    triton: Triton
    gateway: Gateway


@asynccontextmanager
async def stage(more: Mapping[str, str] | None = None) -> AsyncIterator[Stage]:
    """Starts new servers. The gateway is ready, so its samples have run. ``more``: settings of the gateway."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with running_triton(Path(folder)) as triton, running_gateway(Path(folder), triton, more=more) as gateway:
            yield Stage(triton, gateway)


@asynccontextmanager
async def running_triton(folder: Path, models: Path | None = None) -> AsyncIterator[Triton]:
    """Starts a Triton that has received no request yet.

    ``models``: its repository; default the reference models and those of this package, linked into ``folder``.
    """
    repository, venv = models or _linked_models(folder / "models"), ROOT / ".venv-triton"
    embedded = EmbeddedTriton(EmbeddedOptions(repository, venv, exit_timeout_s=20, read=served_repository))
    await embedded.start()
    try:
        async with InferenceServerClient(embedded.grpc_url) as client:
            yield Triton(_pid_of(embedded), embedded.grpc_url, embedded.http_url, embedded.metrics_url, client)
    finally:
        await embedded.stop()


@asynccontextmanager
async def running_gateway(
    folder: Path,
    triton: Triton,
    workers: int = 1,
    more: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "app.cli", "serve"),
) -> AsyncIterator[Gateway]:
    """Starts a gateway as a separate process, with the pipelines of the checkout and of this package, until ready."""
    port, admin_port = free_ports(2)
    settings = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_ADMIN_PORT": str(admin_port),
        "GATEWAY_TRITON_URL": triton.grpc_url,
        "GATEWAY_CONFIG": str(_joined_config(folder)),
        "GATEWAY_LOG_LEVEL": "warning",
        "GATEWAY_MAX_CONNECTIONS": "8192",
        "GATEWAY_WORKERS": str(workers),
        **(more or {}),
    }
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    with process([*command], settings, folder / "gateway.log") as running:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S, limits=limits) as client:
            admin_url = f"http://127.0.0.1:{admin_port}"
            await wait_until_ready(client, f"{admin_url}/health/ready", running, folder / "gateway.log")
            yield Gateway(client, str(client.base_url), admin_url, running.pid)


def _linked_models(folder: Path) -> Path:
    folder.mkdir()
    for source in (ROOT / "triton_models", HERE / "models"):
        for model in source.iterdir():
            if (model / "config.pbtxt").exists():
                (folder / model.name).symlink_to(model)
    return folder


def _joined_config(folder: Path) -> Path:
    texts = [path.read_text() for path in (ROOT / "gateway.yaml", HERE / "gateway.yaml")]
    pipelines = {name: spec for text in texts for name, spec in yaml.safe_load(text)["pipelines"].items()}
    (folder / "samples").symlink_to(ROOT / "samples")
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"pipelines": pipelines}))
    return folder / "gateway.yaml"


@contextmanager
def process(
    command: list[str], settings: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process for the duration of the block, with its output in ``log``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=inherited | settings,
            stdout=stream,
            stderr=stream,
            cwd=ROOT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, with a kill if necessary: a server may wait for its open streams."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def wait_until_ready(client: httpx.AsyncClient, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError with the end of the log if the server ends, or does not answer 200 within ``START_S``."""
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        with suppress(httpx.TransportError):
            if (await client.get(path)).status_code == 200:
                return
        await asyncio.sleep(0.02)
    raise RuntimeError(f"{log.stem} did not become ready:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


def _pid_of(embedded: EmbeddedTriton) -> int:
    assert embedded.pid is not None
    return embedded.pid


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        return [bind_to_free_port(each, "127.0.0.1") for each in sockets]


def _tensor(name: str, array: np.ndarray) -> InferInput:
    tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _counter(lines: list[str], start: str) -> int:
    return sum(round(float(line.split()[-1])) for line in lines if line.startswith(start))
