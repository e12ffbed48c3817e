"""Prints the results of a client's calls as JSON: the returned value or the raised error.

Also the script of a slow model that writes a file when it is cancelled, for clients that disconnect.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as exc:
        return error_of(exc)


async def async_outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except Exception as exc:
        return error_of(exc)


def error_of(error: Exception) -> dict[str, Any]:
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return {"error": type(error).__name__, "status": status, "message": str(error)}


def show(outcomes: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(outcomes)}\n")
    sys.stdout.flush()


CHUNKS = 3
"""Number of events to read before the client disconnects."""
WAIT_S = 5.0


def slow_script(notice: Path) -> str:
    """Returns a script with 60 responses in 6 s."""
    notice.unlink(missing_ok=True)
    return json.dumps({"outputs": 60, "interval_s": 0.1, "notice": str(notice)})


def sent_until_cancelled(notice: Path) -> int | None:
    """Returns how many responses the model sent before it was cancelled. None means that it was not cancelled."""
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        if notice.exists() and notice.read_text():
            return int(notice.read_text().split()[1])
        time.sleep(0.02)
    return None


async def left(stream: Any, notice: Path) -> int | None:
    """Disconnects within an asynchronous stream. Returns what `sent_until_cancelled` returns."""
    for _ in range(CHUNKS):
        await anext(stream)
    await stream.aclose()
    return await asyncio.to_thread(sent_until_cancelled, notice)
