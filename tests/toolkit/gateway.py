"""A complete gateway in this process over the fake engine, called without a socket."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from app.admission.admission import WHOLE
from app.admission.keys import FollowedKeys
from app.api.bodies import Limits
from app.api.call import Inference
from app.api.downloads import ImageDownloads
from app.api.endpoint import Application, BrowserRules
from app.api.explain.explanations import Explanations
from app.api.idempotency.idempotency_layer import Idempotency
from app.api.sessions.session_layer import Sessions
from app.core.model import ModelConfig
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import CompileContext
from app.routes import DIALECTS, Gateway, create_admin_app, create_app
from app.settings import Settings
from app.streams.store import MemoryStore
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import connected
from tests.toolkit.keys import write_keys
from tests.toolkit.models import KEY


@dataclass
class Served:
    folder: Path
    """The folder of gateway.yaml, keys.yaml and other files."""
    gateway: Gateway
    engine: FakeEngine
    app: Application
    client: httpx.AsyncClient
    admin: httpx.AsyncClient


def gateway_fixture(config: str | None, *models: ModelConfig, answers: Sequence[Any] = (), **options: Any) -> Any:
    """A fixture: a gateway with this gateway.yaml over an engine with scripted answers. ``options``: of ``served``."""

    @pytest.fixture
    async def gateway() -> AsyncIterator[Served]:
        async with served(FakeEngine.of(*models, answers=answers), config, **options) as found:
            yield found

    return gateway


@asynccontextmanager
async def served(
    engine: FakeEngine,
    config: str | None = None,
    *,
    files: Mapping[str, bytes] | None = None,
    limits: Limits | None = None,
    origins: tuple[str, ...] = (),
    cors_headers: tuple[str, ...] = (),
    keys: Sequence[Mapping[str, Any]] | None = None,
    explains: bool | None = None,
    collector_url: str | None = None,
    rules: BrowserRules | None = None,
    tokenizers: str = "",
    downloads: ImageDownloads | None = None,
) -> AsyncIterator[Served]:
    """``config`` and ``keys``: what the files have. ``files``: others, by name. ``tokenizers``: the name of a folder.

    ``explains``: requests of every caller, or only those of keys with ``explain: true``; None: no requests.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        if config is not None:
            files = {"gateway.yaml": config.encode(), **(files or {})}
        for path, content in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        context = CompileContext(early_exit_key=KEY, tokenizers=folder / tokenizers if tokenizers else None)
        catalog = Catalog(engine, folder / "gateway.yaml" if config is not None else None, context)
        catalog.load_file()
        await catalog.refresh()
        await catalog.warm_up()
        engine.requests.clear()
        async with MemoryStore() as store:
            inference = Inference(engine, catalog, Metrics("test"))
            gateway = Gateway(
                inference,
                store,
                limits or Limits(64 * 1024),
                keys=None if keys is None else FollowedKeys(write_keys(folder / "keys.yaml", *keys), DIALECTS),
            )
            gateway.browser_rules, gateway.downloads = rules, downloads
            gateway.settings = Settings(cors_origins=origins, cors_headers=cors_headers)
            explained = Explanations(
                is_on=explains is not None, for_everyone=bool(explains), collector_url=collector_url
            )
            gateway.layers = [Idempotency(), explained, Sessions(inference, gateway.limits, WHOLE)]
            inference.admitted = [layer.admitted for layer in gateway.layers if layer.admitted is not None]
            app = create_app(gateway, admin_port=8081)
            async with _client(app) as client, _client(create_admin_app(gateway, api_port=8080)) as admin:
                yield Served(folder, gateway, engine, app, client, admin)


def _client(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(connected(app), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")
