"""The address of Triton, and the embedded Triton, which runs as long as the gateway."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console

from app.admission.keys import Keyring
from app.observability.log import say
from app.pipelines.file import GatewayFile
from app.process.listening import url_of
from app.process.shutdown import Shutdown
from app.process.supervision import Supervisor
from app.settings import PREFIX, Settings
from app.triton.addresses import addresses_of, is_name
from app.triton.embedded.options import EmbeddedOptions
from app.triton.embedded.progress import shown_on
from app.triton.embedded.server import EmbeddedTriton
from app.triton.stuck import Restart

EXPORT_DELAY_MS = 100
"""The longest delay before Triton sends its spans. The default of 5 s is too long for a user who waits."""

_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A worker's part of the gateway. The supervisor manages Triton."""

    workers: int
    """The number of workers."""
    file: GatewayFile | None
    """The last valid gateway.yaml that the supervisor read."""
    keys: Keyring | None = None
    """The last valid API keys that the supervisor read."""
    number: int = 1
    """The worker's number, from 1."""


@dataclass(frozen=True, slots=True)
class Triton:
    """How the gateway reaches its Triton."""

    grpc_url: str
    """One address or several, as in ``GATEWAY_TRITON_URL``."""
    metrics_url: str | None
    allows_fast_pings: bool
    restart: Restart | None = None
    """Restarts the embedded Triton. None if the gateway did not start Triton."""
    part: WorkerPart | None = None
    """None in the process that reloads failed models and detects a stuck Triton."""

    @property
    def is_single(self) -> bool:
        """Whether there is one address, which is not a DNS name."""
        return len(self.addresses) == 1 and not is_name(self.addresses[0])

    @property
    def addresses(self) -> tuple[str, ...]:
        return addresses_of(self.grpc_url)


@asynccontextmanager
async def running_triton(
    settings: Settings, shutdown: Shutdown, supervisor: Supervisor, admin_port: int
) -> AsyncIterator[Triton]:
    """Yields the Triton to call. An embedded Triton runs for the duration of the block.

    If requests may be explained, the embedded Triton sends its spans to the admin port.
    """
    if not settings.embedded:
        yield Triton(settings.triton_url, settings.triton_metrics_url, allows_fast_pings=False)
        return
    options = EmbeddedOptions(
        settings.embedded_repository,
        settings.models_venv,
        environment=_environment(settings),
        traces_url=f"{url_of(settings.host, admin_port)}/v1/traces" if settings.may_explain else settings.traces_url,
        traces_delay_ms=EXPORT_DELAY_MS if settings.may_explain else None,
    )
    embedded = EmbeddedTriton(options)
    try:
        with shown_on(_console, say) as on_progress:
            await shutdown.unless_requested(embedded.start(on_progress))
        async with supervisor.running("watch of the embedded Triton", embedded.watch()):
            yield Triton(embedded.grpc_url, embedded.metrics_url, allows_fast_pings=True, restart=embedded.restart)
    finally:
        await embedded.stop()


def _environment(settings: Settings) -> dict[str, str]:
    """Returns the environment of the embedded Triton. Its models read these settings (names as in model_kit)."""
    key = {"EARLY_EXIT_KEY": settings.early_exit_key} if settings.early_exit_key else {}
    return os.environ | {f"{PREFIX}LOG_TENSORS": settings.log_tensors} | key
