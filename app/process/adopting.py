"""A gateway.yaml that is made after the start."""

import asyncio
import logging
from pathlib import Path

from app.files.complaints import ConfigError
from app.pipelines.catalog import Catalog

POLL_S = 1.0

_log = logging.getLogger(__name__)


async def adopt_when_made(catalog: Catalog, path: Path) -> None:
    """Waits for the file if the catalog follows none, and then until it is cancelled."""
    problem = ""
    while catalog.path is None:
        if await asyncio.to_thread(path.exists):
            try:
                await catalog.adopt_file(path)
                _log.info("%s is used from now on", path)
            except ConfigError as exc:
                if str(exc) != problem:
                    _log.error("%s cannot be used; every ready model stays served: %s", path, exc)
                problem = str(exc)
        await asyncio.sleep(POLL_S)
    await asyncio.Event().wait()
