"""The gateway under attack."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.attacks.triton import MODEL, triton_without_models_to_run
from benchmarks.stage import START_S, free_ports, process


@dataclass(frozen=True)
class Target:
    """A gateway to attack. ``pid``: the process whose memory is measured."""

    url: str
    admin_url: str
    pid: int


Targets = Callable[[], AbstractAsyncContextManager[Target]]
"""Each call starts a new gateway, or returns the given one."""


@asynccontextmanager
async def own_target() -> AsyncIterator[Target]:
    """Starts a gateway with a Triton that runs no models, because all attacks end before a model is called."""
    port, admin_port = free_ports(2)
    settings = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_ADMIN_PORT": str(admin_port),
        "GATEWAY_LOG_LEVEL": "error",
    }
    command = [sys.executable, "-m", "app.cli", "serve"]
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        config = Path(folder) / "gateway.yaml"
        config.write_text(json.dumps({"pipelines": {MODEL: {"model": MODEL}}}))
        async with triton_without_models_to_run() as triton_url:
            settings |= {"GATEWAY_TRITON_URL": triton_url, "GATEWAY_CONFIG": str(config)}
            with process(command, settings, Path(folder) / "gateway.log") as running:
                url = f"http://127.0.0.1:{port}"
                async with asyncio.timeout(START_S):
                    await _is_ready(url)
                yield Target(url, f"http://127.0.0.1:{admin_port}", running.pid)


async def _is_ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            try:
                if (await client.get("/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)
