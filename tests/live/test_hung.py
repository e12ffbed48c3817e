"""One model hangs while Triton is live and another model answers, or all models hang."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.live.test_dead_process import arguments_of, parent_of, processes_of
from tests.toolkit.arenas import lock_arenas
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.waiting import eventually

CONFIG = """
pipelines:
  scripted:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    timeout_s: 1
    sample: {script: "{}"}
  other:
    model: other
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    timeout_s: 1
    sample: {script: "{}"}
"""
BOTH = ("scripted", "other")


def ask(gateway: GatewayProcess, pipeline: str, script: str = "{}") -> int:
    url = f"{gateway.url}/v1/pipelines/{pipeline}"
    return httpx.post(url, json={"script": script}, timeout=20).status_code


def pipelines(gateway: GatewayProcess) -> dict[str, str]:
    states: dict[str, str] = httpx.get(f"{gateway.admin_url}/health/ready").json()["pipelines"]
    return states


def deadlock(triton: int, *models: str) -> None:
    """All processes of the models wait for a lock of malloc that nobody releases."""
    processes = [process for model in models for process in processes_of(triton, model)]
    assert len(processes) == 2 * len(models)
    for process in processes:
        lock_arenas(process)


def ask_often(gateway: GatewayProcess, *names: str, until: threading.Event) -> None:
    while not until.is_set():
        for name in names:
            ask(gateway, name)
        until.wait(0.2)


@contextmanager
def traffic(gateway: GatewayProcess, *names: str) -> Iterator[None]:
    """One client of each pipeline."""
    over = threading.Event()
    with ThreadPoolExecutor(len(names)) as pool:
        clients = [pool.submit(ask_often, gateway, name, until=over) for name in names]
        try:
            yield
        finally:
            over.set()
    for client in clients:
        client.result()


def pid_of_triton(gateway: GatewayProcess) -> int:
    """The tritonserver below the guard, which is a child of the gateway."""
    for folder in Path("/proc").glob("[0-9]*"):
        parent = parent_of(folder)
        if (
            "tritonserver" in arguments_of(folder).split("\0")[0]
            and parent_of(Path(f"/proc/{parent}")) == gateway.process.pid
        ):
            return int(folder.name)
    raise AssertionError


@pytest.fixture
def embedded(tmp_path: Path, models_venv: Path) -> dict[str, str]:
    """The settings of a gateway with two models in an embedded Triton."""
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    for name in BOTH:
        folder = shutil.copytree(Path(__file__).parent / "models" / "scripted", tmp_path / "repository" / name)
        text = (folder / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(text.replace('name: "scripted"', f'name: "{name}"'))
    settings = {"embedded": "true", "embedded_repository": str(tmp_path / "repository")}
    return settings | {"embedded_venv": str(models_venv), "config": str(tmp_path / "gateway.yaml")}


def wait_until_hung(gateway: GatewayProcess, hung: list[str]) -> None:
    """The other models answer."""
    eventually(lambda: "its breaker is open" in gateway.log or "does not answer" in gateway.log, 60)
    eventually(lambda: all(pipelines(gateway)[name] != "ready" for name in hung), 60)
    for name in set(BOTH) - set(hung):
        assert (ask(gateway, name), pipelines(gateway)[name]) == (200, "ready")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "hung"), [("2", ["scripted"]), ("1", ["scripted", "other"])])
def test_hung_models_of_an_embedded_triton_answer_again(
    tmp_path: Path, embedded: dict[str, str], workers: str, hung: list[str]
) -> None:
    """One model is reloaded; if all models hang, Triton is restarted."""
    with running_gateway(tmp_path / "gateway", workers=workers, **embedded) as gateway:
        assert [ask(gateway, name) for name in BOTH] == [200, 200]
        triton = pid_of_triton(gateway)
        deadlock(triton, *hung)
        with traffic(gateway, *hung):
            wait_until_hung(gateway, hung)
            eventually(lambda: [ask(gateway, name) for name in hung] == [200] * len(hung), 150)
        eventually(lambda: set(pipelines(gateway).values()) == {"ready"})
        assert (pid_of_triton(gateway) == triton) == (len(hung) == 1)
