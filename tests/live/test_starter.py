"""The real Triton runs the folder that ``triton-gateway init`` writes; the Triton of the wheel runs standalone."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.cli import main
from app.launcher.launch import Ports
from app.process.tritons import run_triton
from app.settings import Settings
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.docs.walkthrough import Reader, blocks_after
from tests.live.test_documented_commands import environment_without_proxies
from tests.toolkit.processes import GatewayProcess, running_gateway


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "models"
    assert main(["init", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def started(models: Path, models_venv: Path) -> Iterator[GatewayProcess]:
    """The gateway of the folder. Its working directory has an unrelated gateway.yaml."""
    working = models.parent / "working"
    working.mkdir()
    (working / "gateway.yaml").write_text("pipelines: {other: {model: absent}}\n")
    settings = {"embedded": "true", "embedded_repository": str(models), "embedded_venv": str(models_venv)}
    with running_gateway(working, **settings) as gateway:
        yield gateway


def ask(gateway: GatewayProcess, path: str, text: str) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/pipelines/{path}", json={"text": text}, timeout=30)


def test_the_gateway_serves_the_pipelines_of_the_folder(started: GatewayProcess) -> None:
    listed = httpx.get(f"{started.url}/v1/pipelines").json()["pipelines"]
    assert sorted(each["name"] for each in listed) == ["count", "report", "words"]


def test_the_requests_of_the_readme_work(started: GatewayProcess, models: Path, require: Require) -> None:
    require(shutil.which("curl"), "curl is not installed")
    (_, requests) = [text for language, text in blocks_of(models / "README.md") if language == "sh"]
    program = ["bash", "-euo", "pipefail", "-c", requests.replace("http://127.0.0.1:8080", started.url)]
    environment = environment_without_proxies()
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert '"early_exit":"no_text"' in done.stdout
    assert done.stdout.count("event: output") == 5
    assert done.stdout.count("event: done") == 1


@pytest.mark.full
async def test_standalone_triton_works_as_documented(models: Path, models_venv: Path, tmp_path: Path) -> None:
    ports = Ports.free()
    running = asyncio.create_task(run_triton(Settings(embedded_repository=models, embedded_venv=models_venv), ports))
    url = f"http://127.0.0.1:{ports.http}/v2/models/text_report/ready"
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    await asyncio.to_thread(follow_page, tmp_path, models, f"127.0.0.1:{ports.grpc}")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(url)


def follow_page(folder: Path, models: Path, triton: str) -> None:
    working = folder / "working"
    working.mkdir()
    (working / "my_models").symlink_to(models)
    reader = Reader(working, {"127.0.0.1:8001": triton})
    try:
        reader.follow(blocks_after(ROOT / "docs" / "how-to" / "standalone-triton.md", "The gateway in front of it"))
    finally:
        statuses = list(reader.leave())
    assert statuses == [0]
