"""The gateway under attack."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.stage import START_S, free_ports, process


@dataclass(frozen=True)
class Target:
    """``pid`` is the process whose memory is measured."""

    url: str
    admin_url: str
    pid: int


@asynccontextmanager
async def own_target() -> AsyncIterator[Target]:
    """A gateway without a Triton: what is measured here ends before a model is called."""
    port, admin_port, no_triton = free_ports(3)
    settings = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_ADMIN_PORT": str(admin_port),
        "GATEWAY_TRITON_URL": f"127.0.0.1:{no_triton}",
        "GATEWAY_LOG_LEVEL": "error",
    }
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        command = [sys.executable, "-m", "app.cli", "serve"]
        with process(command, settings, Path(folder) / "gateway.log") as running:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(START_S):
                await _is_listening(url)
            yield Target(url, f"http://127.0.0.1:{admin_port}", running.pid)


async def _is_listening(url: str) -> None:
    while True:
        try:
            _reader, writer = await connect(url)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)
