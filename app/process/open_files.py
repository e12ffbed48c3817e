"""The limit of open files (``ulimit -n``): each connection needs a file descriptor, and without one it is reset."""

import asyncio
import errno
import logging
import os
import resource
from collections.abc import Callable
from contextlib import suppress

RESERVED = 512
"""Descriptors for other uses than accepted connections: rejected connections, Triton, Redis, files, the log."""
CHECK_S = 1.0

_log = logging.getLogger(__name__)


def connections_within(limit: int) -> int:
    """Returns how many of ``limit`` connections the process can open; raises its limit of open files if necessary.

    The other connections get 429, which is logged and counted, while the event loop resets connections for which there
    is no file descriptor.
    """
    files = _allow_files(limit + RESERVED)
    fitting = min(limit, max(files - RESERVED, files // 2))
    if fitting < limit:
        _log.warning(
            "the limit of open files is %d, so that a process accepts %d connections and not %d "
            "(GATEWAY_MAX_CONNECTIONS); raise the limit (ulimit -n) to %d",
            *(files, fitting, limit, limit + RESERVED),
        )
    return fitting


def _allow_files(wanted: int) -> int:
    """Raises the soft limit up to ``wanted``, as far as the hard limit allows it. Returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def watch_open_files(count: Callable[[], None]) -> None:
    """Calls ``count`` in each second in which no file can be opened. Logs the beginning and the end."""
    was_full = False
    while True:
        is_full = False
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as exc:
            is_full = exc.errno in {errno.EMFILE, errno.ENFILE}
        if is_full:
            count()
        if is_full and not was_full:
            _log.error("no file descriptor is free: new connections are reset; raise the limit (ulimit -n)")
        elif was_full and not is_full:
            _log.warning("file descriptors are free again")
        was_full = is_full
        await asyncio.sleep(CHECK_S)
