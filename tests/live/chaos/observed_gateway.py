"""``triton-gateway serve`` that writes the numbers of its tasks, gRPC calls and circles to ``levels.json`` on SIGUSR2.

``COLLECTS=no``: it collects garbage only then. ``SESSION_KEPT_S``: for how long it knows ended sessions.
"""

import asyncio
import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path

from app.api.sessions import open_sessions
from app.cli import main
from app.grpc.connection import Http2Call


def _write_levels(*_: object) -> None:
    circles = gc.collect()
    calls = sum(isinstance(each, Http2Call) for each in gc.get_objects())
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    written = Path("levels.new")
    written.write_text(json.dumps({"calls": calls, "tasks": tasks, "circles": circles}))
    written.rename("levels.json")


if __name__ == "__main__":
    if os.environ.get("COLLECTS") == "no":
        gc.disable()
    open_sessions.KEEP_S = float(os.environ.get("SESSION_KEPT_S", open_sessions.KEEP_S))
    signal.signal(signal.SIGUSR2, _write_levels)
    raise SystemExit(main())
