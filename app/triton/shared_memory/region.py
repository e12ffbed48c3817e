"""One region: a file in ``/dev/shm`` that the gateway creates and both map."""

import errno
import mmap
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Triton opens a region with ``shm_open``, which uses only this folder."""
_PAGES_PER_SIZE = 8
_SMALLEST_STEP = 256 * 1024


class Region:
    """Has a file only from :meth:`allocate` to :meth:`unlink`; the mapping lives as long as this object."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.used_at = 0.0
        """When the last call returned the region, in monotonic seconds."""
        self._memory: mmap.mmap | None = None

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / self.name

    @property
    def view(self) -> memoryview:
        assert self._memory is not None, "allocate comes first"
        return memoryview(self._memory)

    def allocate(self) -> None:
        """Allocates all pages, because a missing page would later kill the process that accesses it. Raises OSError."""
        _check_room(self.size)
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Removes the name. The memory stays while a process maps it. A no-op without a file."""
        self.path.unlink(missing_ok=True)


def rounded(size: int) -> int:
    """Rounds ``size`` up by at most a quarter, so that calls of similar size can share a region."""
    step = max(_SMALLEST_STEP, (1 << max(size - 1, 0).bit_length()) // _PAGES_PER_SIZE)
    return -(-size // step) * step


def _check_room(size: int) -> None:
    """Raises OSError if less than half of the file system would stay free for the tensors of Python models."""
    system = os.statvfs(SHARED_MEMORY)
    if system.f_bavail * system.f_frsize - size < system.f_blocks * system.f_frsize // 2:
        raise OSError(errno.ENOSPC, f"half of {SHARED_MEMORY} has to stay free for the models")
