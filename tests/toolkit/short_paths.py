"""Short names for folders, for unix sockets: their addresses have at most 107 bytes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Yields another name of ``folder`` for this process and others of the same user."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
