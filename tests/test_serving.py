"""What the process says on its terminal while it is not ready."""

import asyncio
import time
from pathlib import Path

from tests.fakes.triton import FakeTriton, serving
from tests.processes import free_ports, running_gateway


def config(folder: Path) -> str:
    path = folder / "gateway.yaml"
    path.write_text("pipelines: {shown: {model: m}, other: {model: m, readiness: optional}}")
    return str(path)


def said(log_path: Path, text: str) -> bool:
    ends = time.monotonic() + 20
    while text not in log_path.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
    return log_path.read_text().count(text) == 1


def test_it_names_the_triton_that_it_waits_for(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = {"triton_url": f"127.0.0.1:{port}", "config": config(tmp_path)}
    with running_gateway(tmp_path / "gateway", ready=False, **settings) as gateway:
        assert said(gateway.log_path, f"Waiting for Triton at 127.0.0.1:{port}.\n")


async def test_it_names_the_pipelines_that_it_waits_for(tmp_path: Path) -> None:
    async with serving(FakeTriton()) as triton:
        settings = {"triton_url": triton.url, "config": config(tmp_path)}
        with running_gateway(tmp_path / "gateway", ready=False, **settings) as gateway:
            assert await asyncio.to_thread(said, gateway.log_path, "Waiting for shown (model not ready).\n")
