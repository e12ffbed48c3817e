"""Messages for the user at the terminal."""

import asyncio
import math
import sys
import time

from app.api.pipelines.samples import samples_of
from app.api.routes.health import WorkerStates
from app.pipelines.catalog import Catalog
from app.process.diagnosing import wrong_address

WAITING_S = 2.0
"""If the start takes longer than this, report once what is missing."""


async def announce(
    catalog: Catalog, url: str, triton_url: str, workers: WorkerStates | None = None, *, with_key: bool = False
) -> None:
    """Reports when the gateway is ready and how to try it, then waits until cancelled.

    ``with_key``: whether the gateway requires API keys.
    """
    says_why_at = time.monotonic() + WAITING_S
    if not catalog.triton_is_up:
        await _say_what_is_wrong_with(triton_url)
    while not (catalog.is_ready and (workers is None or workers.is_ready)):
        await asyncio.sleep(0.05)
        if time.monotonic() > says_why_at:
            _say(_missing(catalog, triton_url))
            says_why_at = math.inf
    _say(f"triton-gateway is ready: {url}/")
    pipelines = [entry.pipeline for entry in catalog.entries.values() if entry.pipeline]
    if pipelines:
        declared_first = sorted(pipelines, key=lambda pipeline: pipeline.spec.sample is None)
        _say(f"Try: {samples_of(declared_first[0], url, with_key=with_key)['curl']}")
    await asyncio.Event().wait()


async def _say_what_is_wrong_with(triton_url: str) -> None:
    for address in triton_url.split(","):
        if problem := await wrong_address(address.strip()):
            _say(f"Triton at {address.strip()}: {problem}.")


def _missing(catalog: Catalog, triton_url: str) -> str:
    if not catalog.triton_is_up:
        return f"Waiting for Triton at {triton_url}."
    waited_for = [f"{name} ({entry.state.words})" for name, entry in catalog.unready.items()]
    return f"Waiting for {', '.join(waited_for or ['the workers'])}."


def _say(line: str) -> None:
    # Does not use rich, because its first line blocks the event loop for 30 ms.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
