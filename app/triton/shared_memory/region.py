"""One region: a file in ``/dev/shm`` that the gateway makes and Triton maps too."""

import errno
import mmap
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Triton opens a region by ``shm_open``, which looks nowhere else."""
_PAGES_PER_SIZE = 8
_SMALLEST_STEP = 256 * 1024


class Region:
    """Has a file only from :meth:`allocate` to :meth:`unlink`; the mapping lives as long as this object."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.used_at = 0.0
        """When the last call gave it back, in monotonic seconds."""
        self._memory: mmap.mmap | None = None

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / self.name

    @property
    def view(self) -> memoryview:
        assert self._memory is not None, "allocate comes first"
        return memoryview(self._memory)

    def allocate(self) -> None:
        """Takes the memory now: a page that is missing later would end the process that touches it. Raises OSError."""
        _check_room(self.size)
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Removes the name; the memory stays as long as somebody maps it. A no-op without a file."""
        self.path.unlink(missing_ok=True)


def rounded(size: int) -> int:
    """At most a quarter more than ``size``, so that calls of nearly the same size can share a region."""
    step = max(_SMALLEST_STEP, (1 << max(size - 1, 0).bit_length()) // _PAGES_PER_SIZE)
    return -(-size // step) * step


def _check_room(size: int) -> None:
    """Raises OSError. Python models pass their tensors through the same file system: half of it stays free for them."""
    system = os.statvfs(SHARED_MEMORY)
    if system.f_bavail * system.f_frsize - size < system.f_blocks * system.f_frsize // 2:
        raise OSError(errno.ENOSPC, f"half of {SHARED_MEMORY} has to stay free for the models")
