"""Opens the gateway itself: the Triton that it calls, its catalog, and what follows both."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app import __version__
from app.admission.admission import Admission
from app.admission.followed_keys import FollowedKeys
from app.api.browser_guard import BrowserRules, host_of
from app.api.explaining import Explaining
from app.api.inference import Inference
from app.api.limits import Limits
from app.domain.engine import Engine
from app.domain.loopback import is_loopback
from app.files.complaints import ConfigError
from app.main import Gateway
from app.observability.explain.request import Explanations
from app.observability.explain.store import ExplainStore
from app.observability.metrics import Metrics
from app.observability.tracing import Tracer
from app.pipelines.cancellation import Canceller
from app.pipelines.catalog import Catalog
from app.pipelines.compile import Surroundings
from app.process.adopting import adopt_when_made
from app.process.credentials import metrics_tls_of
from app.process.open_files import watch_open_files
from app.process.refreshing import ModelCheck, keep_fresh
from app.process.servers import Servers
from app.process.small_shares import ShareCheck
from app.process.supervision import Supervisor
from app.process.triton import Triton
from app.settings import Settings
from app.streams.store import StreamStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stores:
    """What outlives a request. ``streams``: None if resumable streams are off.

    ``explanations``: None if no request may be explained.
    """

    streams: StreamStore | None
    explanations: Explanations | None


@asynccontextmanager
async def open_gateway(
    settings: Settings, triton: Triton, stores: Stores, tracer: Tracer, supervisor: Supervisor
) -> AsyncIterator[Gateway]:
    """Raises ConfigError if gateway.yaml does not fit the models of a Triton that already answers.

    A worker starts nevertheless, because the other workers may still serve the previous version of the file.
    """
    explanations = stores.explanations
    metrics = Metrics(__version__, has_addresses=not triton.is_single)
    keys = _keys_of(settings, triton)
    servers = Servers(settings, triton, metrics, tracer, supervisor)
    async with servers.opened() as calls:
        engine, lane = calls.engine, calls.lane
        catalog = await _catalog_of(settings, triton, engine)
        servers.canaries.catalog = catalog
        check = ModelCheck(catalog, engine, is_done=triton.part is not None)
        await check.run_once()
        canceller = Canceller(engine)
        workers, number = (triton.part.workers, triton.part.number) if triton.part else (1, 1)
        admission = Admission(workers, len(triton.addresses), number)
        shares = ShareCheck(catalog, keys, 1 if triton.part else settings.workers)
        gateway = Gateway(
            Inference(
                engine,
                catalog,
                metrics,
                canceller,
                tracer,
                admission=admission,
                explaining=None if explanations is None else Explaining(explanations, for_everyone=settings.explain),
            ),
            stores.streams,
            limits_of(settings),
            None if lane is None else lane.bodies,
            triton.metrics_url,
            metrics_tls_of(settings),
            servers.health,
            keys,
            explanations if isinstance(explanations, ExplainStore) else None,
            settings.traces_url,
            browser_rules=browser_rules_of(settings),
        )
        async with (
            supervisor.running("catalog refresh", keep_fresh(catalog, check, metrics, keys, shares)),
            supervisor.running("watch of open files", watch_open_files(metrics.out_of_files.inc)),
            supervisor.running("wait for gateway.yaml", adopt_when_made(catalog, settings.default_config)),
        ):
            yield gateway
        await canceller.close()


def _keys_of(settings: Settings, triton: Triton) -> FollowedKeys | None:
    """Reads the keys; None if no keys are required. Raises ConfigError."""
    path = settings.api_keys_file
    return None if path is None else FollowedKeys(path, triton.part.keys if triton.part else None)


async def _catalog_of(settings: Settings, triton: Triton, engine: Engine) -> Catalog:
    """Raises ConfigError."""
    key = settings.early_exit_key.encode() if settings.early_exit_key else None
    catalog = Catalog(
        engine,
        settings.config_path,
        Surroundings(
            settings.timeout_s, key, settings.expose_model_errors == "true", settings.expose_model_errors != "false"
        ),
        triton.grpc_url,
    )
    if settings.config_path is None and triton.part is None:
        looked_for = settings.default_config.absolute()
        _log.info("there is no %s: every ready model is served under its own name, until the file exists", looked_for)
    catalog.load_file(triton.part.file if triton.part else None)
    await catalog.refresh()
    if catalog.complaints and triton.part is None:
        raise ConfigError("\n".join(catalog.complaints))
    return catalog


def limits_of(settings: Settings) -> Limits:
    return Limits(
        settings.max_body_bytes, settings.max_bytes_in_flight, ping_s=settings.ping_s, send_s=settings.send_timeout_s
    )


def browser_rules_of(settings: Settings) -> BrowserRules | None:
    """None if keys protect the gateway, or if other machines can call it anyway, unless the operator lists hosts."""
    is_open = settings.api_keys_file is None and is_loopback(settings.host)
    if not (is_open or settings.allowed_hosts):
        return None
    hosts, origins = frozenset(map(host_of, settings.allowed_hosts)), frozenset(settings.cors_origins)
    return BrowserRules(hosts, origins, refuses_cross_site=is_open)
