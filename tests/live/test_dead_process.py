"""The gateway detects and repairs a model whose Python process died; Triton 2.51 still reports the model as ready."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from app.triton.connect import open_transport
from app.triton.triton_engine import TritonEngine
from tests.live.repairing import repairing_gateway
from tests.toolkit.processes import GatewayProcess, running_triton, scripted_models, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually

CONFIG = """
pipelines:
  scripted:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    sample: {script: "{}"}
"""
LLM = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
LLM_CONFIG = """
pipelines:
  llm:
    model: llm
    inputs: {prompt: {tensor: text_input, kind: text}}
    outputs: {text: {tensor: text_output, kind: text}}
    stream: true
    engine_errors: [EngineCore encountered an issue, EngineDeadError]
    sample: {prompt: Hi}
"""


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """A Triton for this module only, because its tests kill the model processes."""
    repository = scripted_models(tmp_path_factory.mktemp("own") / "repository")
    (repository / "llm" / "1").mkdir(parents=True)
    (repository / "llm" / "config.pbtxt").write_text(LLM)
    (repository / "llm" / "1" / "model.py").symlink_to(Path(__file__).parent / "engine_model.py")
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


gateway_of = partial(repairing_gateway, config=CONFIG)


def processes_of(triton: int | None, model: str) -> list[int]:
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if f"/{model}/1/model.py" in arguments_of(folder) and parent_of(folder) == triton
    ]


def arguments_of(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""


def parent_of(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill_processes_of(triton: EmbeddedTriton, model: str) -> None:
    found = processes_of(triton.pid, model)
    assert len(found) == 2
    for process in found:
        os.kill(process, signal.SIGKILL)


def ask(gateway: GatewayProcess) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/pipelines/scripted", json={"script": "{}"}, timeout=PATIENCE_S)


def readiness(gateway: GatewayProcess) -> int:
    return httpx.get(f"{gateway.url}/health/ready").status_code


async def reload(url: str) -> None:
    async with open_transport(url) as channel:
        await TritonEngine(channel).reload_model("scripted")


def test_with_repair_the_model_works_again(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, repair="true") as gateway:
        assert ask(gateway).status_code == 200
        kill_processes_of(own_triton, "scripted")
        first = ask(gateway)
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (503, "model_not_ready", True)
        assert int(first.headers["Retry-After"]) > 0
        assert "GATEWAY_TRITON_REPAIR" not in first.text
        eventually(lambda: "model 'scripted' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        assert [ask(gateway).status_code for _ in range(4)] == [200] * 4
        assert gateway.metric("stub_deaths_total", model="scripted") == 1


def test_without_repair_readiness_fails_until_a_reload(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, repair="false") as gateway:
        kill_processes_of(own_triton, "scripted")
        first = ask(gateway)
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (502, "model_error", False)
        assert "GATEWAY_TRITON_REPAIR" in first.json()["hint"]
        eventually(lambda: readiness(gateway) == 503)
        assert gateway.metric("stub_deaths_total", model="scripted") == 1
        asyncio.run(reload(own_triton.grpc_url))
        wait_until_ready(gateway, PATIENCE_S)
        assert ask(gateway).status_code == 200


@pytest.mark.full
def test_several_workers_repair_the_model_once(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Every worker encounters the dead process; the supervisor counts it, repairs it, and notifies the workers."""
    with gateway_of(own_triton, tmp_path, repair="true", workers="2") as gateway:
        assert {ask(gateway).status_code for _ in range(8)} == {200}
        kill_processes_of(own_triton, "scripted")
        with ThreadPoolExecutor(8) as pool:
            statuses = [answer.status_code for answer in pool.map(ask, [gateway] * 8)]
        assert statuses.count(503) >= 4
        assert set(statuses) <= {503, 200}, "the last ones may wait in Triton until the repair"
        eventually(lambda: "model 'scripted' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        eventually(lambda: [ask(gateway).status_code for _ in range(8)] == [200] * 8)
        assert gateway.metric("stub_deaths_total", model="scripted") == 1
        assert gateway.log.count("was unloaded and loaded again") == 1


def test_an_engine_that_died_is_loaded_again(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Triton still reports the model as ready, and every request fails."""

    def ask(prompt: str, path: str = "") -> httpx.Response:
        return httpx.post(f"{gateway.url}/v1/pipelines/llm{path}", json={"prompt": prompt}, timeout=PATIENCE_S)

    with repairing_gateway(own_triton, tmp_path, LLM_CONFIG, repair="true") as gateway:
        assert ask("Hi").status_code == 200
        first = ask("die", "/stream")
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (503, "model_not_ready", True)
        assert int(first.headers["Retry-After"]) > 0
        eventually(lambda: "model 'llm' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        assert ask("Hi").json() == {"text": "Hi"}
        assert gateway.metric("engine_deaths_total", model="llm") == 1
