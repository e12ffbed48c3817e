"""Loads a model again when one of its files was changed, for the development of models."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from app.core.files import Stamp, stamp_of
from app.launcher.launch import ServedRepository
from app.launcher.machine import RepositoryUnservable

logger = logging.getLogger(__name__)

POLL_S = 0.5
LOAD_S = 300.0


def stamps_of(repository: Path) -> dict[str, dict[str, Stamp]]:
    """By model, and by file of the model. Compiled modules and hidden files, such as those of editors, do not count."""
    return {each.name: dict(_stamps_in(each)) for each in repository.iterdir() if each.is_dir() and _counts(each.name)}


def _stamps_in(folder: Path) -> Iterator[tuple[str, Stamp]]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = filter(_counts, folders)
        yield from ((path, stamp_of(Path(path))) for path in (f"{parent}/{name}" for name in files if _counts(name)))


def _counts(name: str) -> bool:
    return not name.startswith((".", "__pycache__"))


async def reload_changed(repository: Path, read: Callable[[Path], ServedRepository], client: httpx.AsyncClient) -> None:
    """Runs until it is cancelled. A change that does not load is reported: Triton then keeps the model that it has.

    A change counts when nothing else was written for `POLL_S`. A model that did not load is tried again when another
    was changed, which may be its step. ``read`` says what cannot be loaded; ``client``: of Triton's HTTP service.
    """
    loaded = seen = await asyncio.to_thread(stamps_of, repository)
    failed = set[str]()
    while True:
        await asyncio.sleep(POLL_S)
        try:
            now = await asyncio.to_thread(stamps_of, repository)
        except OSError:  # the repository is away
            continue
        changed = {name for name, stamp in now.items() if stamp and loaded.get(name) != stamp == seen.get(name)}
        loaded, seen = loaded | {name: now[name] for name in changed}, now
        failed &= now.keys()
        for name in (*sorted(changed), *sorted(failed - changed if changed else ())):
            if reason := await _reason_not_to_load(name, repository, read, client):
                logger.error("model '%s' cannot be loaded; Triton keeps what it had: %s", name, reason)
                failed.add(name)
            else:
                logger.info("model '%s' was changed and is loaded", name)
                failed.discard(name)


async def _reason_not_to_load(
    name: str, repository: Path, read: Callable[[Path], ServedRepository], client: httpx.AsyncClient
) -> str:
    """Loads the model. Returns why that was not possible; empty after success."""
    try:
        served = await asyncio.to_thread(read, repository)
        if name in served.refused:
            return served.refused[name]
        answer = await client.post(f"/v2/repository/models/{name}/load", timeout=LOAD_S)
        return "" if answer.is_success else str(answer.json().get("error", answer.text))
    except (httpx.HTTPError, ValueError, RepositoryUnservable) as exc:
        return str(exc) or type(exc).__name__
