"""Files that operators write: read within a bound, and compared with their earlier versions."""

import os
import stat
from pathlib import Path

Stamp = tuple[int, ...]
"""Differs for two versions of a file."""


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Never waits, as a read from a pipe or a device would. Raises OSError, also for a larger file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"'{path}' is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"'{path}' is larger than {max_bytes} bytes")
    return content


def stamp_of(path: Path) -> Stamp:
    """Changes with the content, and where a link leads to another file; zeros while the file is away."""
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
