"""A watcher of a gateway: a module that runs in a process of its own, and prints what it found as one JSON object.

It prints a line when it begins, and ends when its input closes.
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
    """Runs ``python -m module URL PID`` for the duration of the block. Its JSON object becomes fields of ``found``."""
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
