"""Messages for the user at the terminal."""

import asyncio
import math
import time
from pathlib import Path

from app.api.pipelines.samples import samples_of
from app.api.routes.health import WorkerStates
from app.observability.log import say
from app.pipelines.catalog import Catalog
from app.pipelines.example import Filled, example_of, file_names_of
from app.pipelines.pipeline import Pipeline
from app.process.diagnosing import wrong_address

WAITING_S = 2.0
"""If the start takes longer than this, report once what is missing."""


async def announce(
    catalog: Catalog,
    url: str,
    triton_url: str,
    workers: WorkerStates | None = None,
    *,
    with_key: bool = False,
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
            say(_missing(catalog, triton_url))
            says_why_at = math.inf
    say(f"triton-gateway is ready: {url}/")
    pipelines = [entry.pipeline for entry in catalog.entries.values() if entry.pipeline]
    if pipelines:
        declared_first = sorted(pipelines, key=lambda pipeline: pipeline.spec.sample is None)
        say(f"Try: {_call_of(declared_first[0], url, with_key=with_key)}")
    await asyncio.Event().wait()


async def _say_what_is_wrong_with(triton_url: str) -> None:
    for address in triton_url.split(","):
        if problem := await wrong_address(address.strip()):
            say(f"Triton at {address.strip()}: {problem}.")


def _missing(catalog: Catalog, triton_url: str) -> str:
    if not catalog.triton_is_up:
        return f"Waiting for Triton at {triton_url}."
    waited_for = [f"{name} ({entry.state.words})" for name, entry in catalog.unready.items()]
    return f"Waiting for {', '.join(waited_for or ['the workers'])}."


def _call_of(pipeline: Pipeline, url: str, *, with_key: bool) -> str:
    """A call that works where it is pasted: without values of a large tensor, and without files that are elsewhere."""
    is_large = any(isinstance(value, Filled) for value in example_of(pipeline).values())
    has_files = all(Path(path).is_file() for path in file_names_of(pipeline).values())
    if has_files and not is_large:
        return samples_of(pipeline, url, with_key=with_key)["curl"]
    address = f"{url}/v1/pipelines/{pipeline.name}"
    key = ' -H "Authorization: Bearer $API_KEY"' if with_key else ""
    if pipeline.spec.sample is None:
        return f"curl {address}{key}"
    return f"curl {address}/examples/sample{key} | curl {address}{key} -H 'Content-Type: application/json' -d @-"
