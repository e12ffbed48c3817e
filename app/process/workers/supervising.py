"""The supervisor of ``triton-gateway serve`` with several workers."""

import logging
import os
import socket
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace

from app import __version__
from app.api.connection.protocol import ConnectionLimit
from app.main import Gateway, create_admin_app
from app.observability.explain.store import ExplainStore
from app.observability.exporter import open_tracer
from app.observability.lines import turns_by
from app.observability.log import configure_logging
from app.observability.shared_values import Descriptors
from app.observability.tracing import NoTracer
from app.process.announcing import announce
from app.process.gateway import Stores, open_gateway
from app.process.listening import listening, listening_together, serving, url_of
from app.process.open_files import connections_within
from app.process.serving import ADMIN_CONNECTIONS, check_files, freeze_heap, open_store
from app.process.shutdown import Shutdown, ShutdownRequested
from app.process.supervision import Supervisor
from app.process.triton import Triton, WorkerPart, running_triton
from app.process.workers.channel import Order
from app.process.workers.crew import Crew
from app.process.workers.shares import check_shares, settings_of_worker
from app.settings import PREFIX, Settings

_log = logging.getLogger(__name__)


async def supervise(settings: Settings) -> None:
    """Owns the sockets, the embedded Triton and the admin port. Raises what ``app.process.serving.serve`` raises."""
    check_shares(settings)
    log_lock = os.memfd_create("turns of the log")
    configure_logging(settings.log_level, settings.log_format, turn=turns_by(log_lock))
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    supervisor = Supervisor(on_failure=shutdown.request)
    check_files(settings)
    connections_within(settings_of_worker(settings, 1).max_connections)
    with suppress(ShutdownRequested):
        async with AsyncExitStack() as stack:
            main = stack.enter_context(
                listening_together(settings.host, settings.port, f"{PREFIX}PORT", settings.workers)
            )
            admin = stack.enter_context(listening(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
            port, admin_port = main[0].getsockname()[1], admin.getsockname()[1]
            await _check_what_workers_need(settings)
            triton = await stack.enter_async_context(running_triton(settings, shutdown, supervisor, admin_port))
            stores = Stores(None, ExplainStore() if settings.may_explain else None)
            gateway = await stack.enter_async_context(open_gateway(settings, triton, stores, NoTracer(), supervisor))
            catalog = gateway.inference.catalog
            crew = Crew(settings.workers, _Orders(settings, triton, gateway, main, admin_port, log_lock), gateway)
            admin_app = create_admin_app(gateway, api_port=port, workers=crew)
            limit = ConnectionLimit(ADMIN_CONNECTIONS, gateway.inference.metrics.count_refused_connection)
            freeze_heap()
            await stack.enter_async_context(serving(admin_app, admin, supervisor, limit))
            await stack.enter_async_context(supervisor.running("workers", crew.run()))
            url = url_of(settings.host, port)
            announcement = announce(catalog, url, triton.grpc_url, crew, with_key=gateway.keys is not None)
            async with supervisor.running("announcement", announcement):
                await shutdown.requested.wait()
            gateway.inference.workload.is_delaying = True
            await crew.drain(shutdown, settings.shutdown_delay_s + settings.drain_s)
    supervisor.raise_if_failed()


@dataclass(frozen=True, slots=True)
class _Orders:
    """Creates the orders for new workers."""

    settings: Settings
    triton: Triton
    gateway: Gateway
    listeners: list[socket.socket]
    admin_port: int
    log_lock: int

    def __call__(self, number: int, metrics: Descriptors) -> Order:
        keys, file = self.gateway.keys, self.gateway.inference.catalog.file
        part = WorkerPart(self.settings.workers, file, None if keys is None else keys.ring, number)
        return Order(
            number=number,
            settings=settings_of_worker(self.settings, number),
            triton=replace(self.triton, restart=None, part=part),
            admin_port=self.admin_port,
            listeners=[listener.fileno() for listener in self.listeners],
            metrics=metrics,
            log_lock=self.log_lock,
            supervisor=os.getpid(),
        )


async def _check_what_workers_need(settings: Settings) -> None:
    """Raises StoreUnusable or TracingUnavailable once, here, instead of in every worker."""
    async with open_tracer(settings.traces_url, __version__):
        pass
    if settings.redis_url is None:
        _log.warning(
            "/v1/streams answers 501 resumable_streams_off: several workers need GATEWAY_REDIS_URL to share it"
        )
        return
    async with open_store(settings):
        pass
