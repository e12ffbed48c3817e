"""``triton-gateway triton``: runs only the wheel's Triton, for gateways and clients on this machine."""

import asyncio
from contextlib import suppress

from rich.console import Console

from app.observability.log import say
from app.process.shutdown import Shutdown, ShutdownRequested
from app.settings import Settings
from app.triton.embedded.options import EmbeddedOptions, Ports
from app.triton.embedded.progress import shown_on
from app.triton.embedded.server import EmbeddedTriton

PORTS = Ports(grpc=8001, http=8000, metrics=8002)
"""Triton's usual ports, on the loopback address."""


async def run_triton(settings: Settings, ports: Ports = PORTS) -> None:
    """Runs until SIGTERM, SIGINT or SIGHUP. Raises EmbeddedTritonError."""
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    triton = EmbeddedTriton(EmbeddedOptions(settings.embedded_repository, settings.models_venv, ports))
    try:
        with suppress(ShutdownRequested):
            with shown_on(Console(stderr=True), say) as on_progress:
                await shutdown.unless_requested(triton.start(on_progress))
            say(f"Triton is ready: gRPC {triton.grpc_url}, HTTP {triton.http_url}, {triton.metrics_url}")
            watching = asyncio.create_task(triton.watch())
            await shutdown.requested.wait()
            watching.cancel()
    finally:
        await triton.stop()
