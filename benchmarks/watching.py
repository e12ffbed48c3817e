"""Runs a watcher of a gateway: a module in a separate process that prints its observations as one JSON object.

The watcher prints a line when it begins, and ends when its input closes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

Found = TypeVar("Found")


@asynccontextmanager
async def watching(module: str, found: Found, url: str, pid: int) -> AsyncIterator[Found]:
    """Runs ``python -m module URL PID`` for the duration of the block. Stores its results in ``found``."""
    watcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, url, str(pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert watcher.stdout is not None
    await watcher.stdout.readline()
    try:
        yield found
    finally:
        printed, _ = await watcher.communicate(b"")
        found.__dict__.update(json.loads(printed))


def say(line: str) -> None:
    """Prints a line of the watcher."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
