"""Starts a real Triton and a real gateway for the whole session, in separate processes."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from app.triton.repository import served_repository
from tests.toolkit.forked_gateway import SERVE, ForkedGateway
from tests.toolkit.keys import write_keys
from tests.toolkit.waiting import eventually, loop_in_a_thread

LIVE = Path(__file__).parents[1] / "live"
ROOT = LIVE.parents[1]
START_S = 240.0
LOG_S = 30.0
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS_OF_A_WORKER = 2_000
FIRST_PORT = 10_000 + WORKER % 5 * PORTS_OF_A_WORKER
PORTS = iter(random.sample(range(FIRST_PORT, FIRST_PORT + PORTS_OF_A_WORKER), PORTS_OF_A_WORKER))
WITHOUT_TRITON = {"triton_url": "127.0.0.1:1", "drain_s": "0"}
"""The settings of a gateway that never becomes ready."""
EXIT_S = 1
"""Triton always waits this long for its Python models before it exits."""


@dataclass(frozen=True)
class GatewayProcess:
    """A running ``triton-gateway serve``; ``log`` is its output so far."""

    process: subprocess.Popen[bytes] | ForkedGateway
    url: str
    admin_url: str
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def log_lines(self, request_id: str) -> list[dict[str, object]]:
        """Returns the JSON lines of a request. Waits for the first line: the log is written after the answer."""
        ends = time.monotonic() + LOG_S
        while not (found := [line for line in self.json_lines() if line.get("request_id") == request_id]):
            if time.monotonic() > ends:
                break
            time.sleep(0.01)
        return found

    def json_lines(self) -> list[dict[str, object]]:
        """Returns the complete JSON lines that have been written."""
        return [json.loads(line) for line in self.log.rpartition("\n")[0].splitlines() if line.startswith("{")]

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that have all of ``labels``."""
        total = 0.0
        for line in httpx.get(f"{self.admin_url}/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            has_labels = all(f'{key}="{wanted}"' in head for key, wanted in labels.items())
            if head.split("{")[0] == f"triton_gateway_{name}" and has_labels:
                total += float(value)
        return total


StartGateway = Callable[..., GatewayProcess]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder with links to the reference models and the scripted models."""
    folder = tmp_path_factory.mktemp("repository")
    for source in (pytestconfig.rootpath / "triton_models", LIVE / "models"):
        for model in source.iterdir():
            if model.is_dir():
                (folder / model.name).symlink_to(model)
    return folder


def linked_models(folder: Path, names: Iterable[str] = ("scripted", "scripted_large", "scripted_stream")) -> Path:
    """Creates a repository with links to some of the reference models and scripted models."""
    folder.mkdir(exist_ok=True)
    for name in names:
        source = LIVE / "models" / name
        (folder / name).symlink_to(source if source.exists() else ROOT / "triton_models" / name)
    return folder


@pytest.fixture(scope="session")
def triton(repository: Path, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """The session's Triton, run by an event loop in a separate thread."""
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


@contextmanager
def running_triton(options: EmbeddedOptions, *, restarts: bool = False) -> Iterator[EmbeddedTriton]:
    """Runs a Triton for the duration of the block. With ``restarts`` it is started again when it exits."""
    server = EmbeddedTriton(replace(options, exit_timeout_s=EXIT_S, read=served_repository))
    watch: Future[None] | None = None
    with loop_in_a_thread() as loop:
        try:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result(START_S)
            if restarts:
                watch = asyncio.run_coroutine_threadsafe(server.watch(), loop)
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(START_S)
            if watch is not None:
                watch.result(START_S)


@pytest.fixture(scope="session")
def config_path(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A ``gateway.yaml`` with the reference pipelines and the scripted pipelines, next to the samples."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "samples").symlink_to(pytestconfig.rootpath / "samples")
    reference = yaml.safe_load((pytestconfig.rootpath / "gateway.yaml").read_text())
    scripted = yaml.safe_load((LIVE / "gateway.yaml").read_text())
    pipelines = reference["pipelines"] | scripted["pipelines"]
    document = {"pipelines": pipelines, "oip": scripted["oip"]}
    (folder / "gateway.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "gateway.yaml"


@pytest.fixture(scope="session")
def gateway(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """The session's gateway, in front of the session's Triton."""
    arguments = {
        "triton_url": triton.grpc_url,
        "triton_metrics_url": triton.metrics_url,
        "config": str(config_path),
        "drain_s": "2",
    }
    with running_gateway(tmp_path_factory.mktemp("gateway"), **arguments) as process:
        yield process


@pytest.fixture
def start_gateway(triton: EmbeddedTriton, tmp_path: Path) -> Iterator[StartGateway]:
    """Starts further gateways for one test: ``start_gateway(drain_s="1")``."""
    running = []

    def start(**settings: str) -> GatewayProcess:
        context = running_gateway(tmp_path / f"gateway-{len(running)}", **({"triton_url": triton.grpc_url} | settings))
        running.append(context)
        return context.__enter__()

    yield start
    for context in running:
        context.__exit__(None, None, None)


@contextmanager
def running_gateway(
    folder: Path,
    *,
    ready: bool = True,
    script: str = SERVE,
    program: Sequence[str] | None = None,
    log_to: IO[bytes] | None = None,
    **settings: str,
) -> Iterator[GatewayProcess]:
    """Runs a gateway for the duration of the block, on free ports. ``settings`` are names of ``app.settings``.

    Without ``program`` and ``log_to``, the gateway is a fork that runs ``script`` (`forked_gateway.py`). ``program``:
    arguments of Python that replace the gateway. ``log_to`` replaces the log file, if another process writes
    ``folder / "log"``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, admin_port = free_ports(2)
    named = {"port": str(port), "admin_port": str(admin_port)} | settings
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    environment |= {f"GATEWAY_{name.upper()}": value for name, value in named.items()}
    log_path = folder / "log"
    process: subprocess.Popen[bytes] | ForkedGateway
    if program is None and log_to is None:
        log_path.touch()
        process = ForkedGateway(environment, folder, log_path, script)
    else:
        command = [sys.executable, *(program or ("-m", "app.cli")), "serve"]
        with log_to or log_path.open("wb") as log:
            process = subprocess.Popen(command, env=environment, stderr=log, cwd=folder, start_new_session=True)
    running = GatewayProcess(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", log_path)
    try:
        if ready:
            wait_until_ready(running)
        yield running
    finally:
        process.terminate()
        process.wait(START_S)


@contextmanager
def configured_gateway(
    triton: EmbeddedTriton, folder: Path, config: str | Mapping[str, Any], /, **settings: str
) -> Iterator[GatewayProcess]:
    """Runs a gateway in front of a Triton. ``config``: the text of gateway.yaml, or its pipelines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gateway.yaml"
    path.write_text(config if isinstance(config, str) else json.dumps({"pipelines": config}))
    named = {"triton_url": triton.grpc_url, "config": str(path), **settings}
    with running_gateway(folder / "gateway", **named) as process:
        yield process


def embedded(folder: Path, models_venv: Path, models: Iterable[str], pipelines: Iterable[str]) -> dict[str, str]:
    """The settings of a gateway with its own Triton, for some of the reference models and scripted models."""
    return {
        "embedded": "true",
        "embedded_repository": str(linked_models(folder / "models", models)),
        "embedded_venv": str(models_venv),
        "config": config_with(folder, pipelines),
    }


def config_with(folder: Path, pipelines: Iterable[str]) -> str:
    """Creates a ``gateway.yaml`` without samples: a gateway with a few pipelines starts fast. Returns its path."""
    path = folder / "gateway.yaml"
    known = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]
    known |= yaml.safe_load((LIVE / "gateway.yaml").read_text())["pipelines"]
    shown = {name: {key: value for key, value in known[name].items() if key != "sample"} for name in pipelines}
    path.write_text(yaml.safe_dump({"pipelines": shown}))
    return str(path)


def live_triton(write: Callable[[Path], object], *, restarts: bool = False, **options: Any) -> Any:
    """A fixture of a module: a Triton with the models that ``write`` creates in an empty folder."""

    @pytest.fixture(scope="module")
    def triton(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
        write(folder := tmp_path_factory.mktemp("models"))
        with running_triton(EmbeddedOptions(folder, models_venv, **options), restarts=restarts) as server:
            yield server

    return triton


def live_gateway(
    config: str | Mapping[str, Any] | None = None,
    triton: str = "triton",
    *,
    keys: Sequence[dict[str, Any]] = (),
    **settings: str,
) -> Any:
    """A fixture of a module: a gateway with this gateway.yaml in front of the Triton of another fixture.

    ``config``: None: that of the session's gateway. ``keys``: of its file ``keys.yaml``, in the folder above its log.
    """

    @pytest.fixture(scope="module")
    def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
        folder, given = tmp_path_factory.mktemp("configured"), dict(settings)
        if keys:
            given["api_keys_file"] = str(write_keys(folder / "keys.yaml", *keys))
        if config is None:
            given["config"] = str(request.getfixturevalue("config_path"))
        with configured_gateway(request.getfixturevalue(triton), folder, config or "", **given) as process:
            yield process

    return gateway


def wait_until_ready(gateway: GatewayProcess, within_s: float = START_S) -> None:
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        if gateway.process.poll() is not None:
            break
        try:
            if httpx.get(f"{gateway.admin_url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail(f"the gateway did not become ready:\n{gateway.log[-4000:]}")


def free_ports(count: int) -> list[int]:
    """Returns ports for servers that start soon, each only once.

    They are below the range for outgoing connections, and each process of pytest-xdist has a range of its own:
    nothing takes a port before its server binds it.
    """
    return list(islice(filter(is_free, PORTS), count))


def is_free(port: int) -> bool:
    """Browsers and Node refuse port 10080 (a "bad port" of the Fetch standard)."""
    if port == 10080:
        return False
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A client of the session's gateway, or of the gateway of the module."""
    with httpx.Client(base_url=gateway.url, timeout=60) as session:
        yield session


def executions(triton: EmbeddedTriton, model: str) -> int:
    """Returns the count of a model, over all its versions. Fails for a model that the page does not have."""
    metric, lines = f'nv_inference_exec_count{{model="{model}"', httpx.get(str(triton.metrics_url)).text.splitlines()
    counts = [int(line.rpartition(" ")[2]) for line in lines if line.startswith(metric)]
    assert counts, f"Triton's page has no count of {model}"
    return sum(counts)


def settled_executions(triton: EmbeddedTriton, model: str) -> int:
    """Returns the count when it has not changed for 0.3 s: Triton counts a request a moment after its answer."""
    counts = [executions(triton, model)]

    def is_settled() -> bool:
        time.sleep(0.3)
        counts.append(executions(triton, model))
        return counts[-1] == counts[-2]

    eventually(is_settled)
    return counts[-1]
