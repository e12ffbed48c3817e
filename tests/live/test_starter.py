"""The Triton of the wheel runs standalone, with the folder that ``triton-gateway init`` writes."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from app.cli import main
from app.launcher.launch import Ports
from app.process.tritons import run_triton
from app.settings import Settings
from tests.docs.pages import ROOT
from tests.docs.walkthrough import Reader, blocks_after


@pytest.mark.full
async def test_standalone_triton_works_as_documented(models_venv: Path, tmp_path: Path) -> None:
    models, ports = tmp_path / "models", Ports.free()
    assert await asyncio.to_thread(main, ["init", str(models)]) == 0
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
    page = ROOT / "docs" / "how-to" / "standalone-triton.md"
    assert reader.follow(blocks_after(page, "The gateway in front of it")) == [0]
