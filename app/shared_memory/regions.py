"""Creates and tracks regions of shared memory, and removes those of killed gateways.

A region is a file in ``/dev/shm``. ``RegionPool`` knows the state of every region of this process; an ``Owner`` marks
the files of a process by a lock, so that the next gateway can remove them.
"""

import errno
import fcntl
import math
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

SHARED_MEMORY = Path("/dev/shm")
"""Triton opens a region with ``shm_open``, which uses only this folder."""
_PAGES_PER_SIZE = 8
_SMALLEST_STEP = 256 * 1024


class Region:
    """One region: a file in ``/dev/shm`` that the gateway creates, and that the gateway and Triton map.

    Has a file only from :meth:`allocate` to :meth:`unlink`; the mapping lives as long as this object.
    """

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
        """Allocates all pages, because a missing page would later kill the process that accesses it. Raises OSError.

        Half of the file system stays free for the tensors of Python models.
        """
        system = os.statvfs(SHARED_MEMORY)
        if system.f_bavail * system.f_frsize - self.size < system.f_blocks * system.f_frsize // 2:
            raise OSError(errno.ENOSPC, f"half of {SHARED_MEMORY} has to stay free for the models")
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


PREFIX = "triton_gateway_lane_"


class Owner:
    """Records which process owns a region, so that the next gateway can remove the regions of a killed gateway.

    Holds the lock of an empty file while the process runs. The kernel releases the lock when the process ends. A
    process id is not sufficient: gateways in different containers share ``/dev/shm``, but not their process ids.
    """

    def __init__(self) -> None:
        self._token = ""
        self._descriptor: int | None = None
        self._count = 0

    def next_name(self) -> str:
        """Returns a unique name. Raises OSError, also if another gateway removed the lock file before it was locked."""
        if self._descriptor is None:
            token = secrets.token_hex(8)
            path = _lock_file(token)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.stat()
            except OSError:
                os.close(descriptor)
                raise
            self._token, self._descriptor = token, descriptor
        self._count += 1
        return f"{PREFIX}{self._token}_{self._count}"

    def owns(self, name: str) -> bool:
        return self._descriptor is not None and _token_of(name) == self._token

    def release(self) -> None:
        """Removes every file of this owner."""
        if self._descriptor is not None:
            _remove_files(self._token)
            os.close(self._descriptor)
            self._descriptor = None


def is_abandoned(name: str) -> bool:
    """Whether a region with this name belongs to a gateway that no longer runs."""
    if not name.startswith(PREFIX):
        return False
    with _has_ended(_token_of(name)) as has_ended:
        return has_ended


def remove_leftovers() -> None:
    """Removes the files of gateways that no longer run."""
    for token in {_token_of(path.name) for path in SHARED_MEMORY.glob(f"{PREFIX}*")}:
        with _has_ended(token) as has_ended:
            if has_ended:
                _remove_files(token)


def _lock_file(token: str) -> Path:
    return SHARED_MEMORY / f"{PREFIX}{token}.lock"


@contextmanager
def _has_ended(token: str) -> Iterator[bool]:
    """Yields whether the process of this owner has ended. If so, holds its lock for the duration of the block."""
    try:
        descriptor = os.open(_lock_file(token), os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        yield isinstance(exc, FileNotFoundError)
        return
    try:
        has_ended = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            has_ended = False
        yield has_ended
    finally:
        os.close(descriptor)


def _remove_files(token: str) -> None:
    for path in SHARED_MEMORY.glob(f"{PREFIX}{token}*"):
        with suppress(OSError):
            path.unlink()


def _token_of(name: str) -> str:
    """Returns the owner's token in the name of a region or a lock file."""
    return name.removeprefix(PREFIX).partition("_")[0].partition(".")[0]


State = Literal["free", "used", "retired"]


class RegionPool:
    """Tracks all regions and their states; no I/O.

    Every region counts against ``limit`` from :meth:`add` to :meth:`drop`. A region is in use by one call, free, or
    retired. A retired region is never used again, because Triton may still read or write it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[Region, State] = {}

    def those(self, *states: State) -> list[Region]:
        return [region for region, state in self._states.items() if state in states]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The bytes that are free, in use, and retired."""
        states: tuple[State, State, State] = "free", "used", "retired"
        free, used, retired = (sum(region.size for region in self.those(state)) for state in states)
        return free, used, retired

    def has_room(self, size: int) -> bool:
        return sum(self.sizes) + size <= self._limit

    def add(self, region: Region) -> None:
        """Adds a new region, in use by a call."""
        self._states[region] = "used"

    def take(self, size: int, most: float = math.inf) -> Region | None:
        """Takes the smallest free region that is large enough and has at most ``most`` bytes."""
        fitting = [region for region in self.those("free") if size <= region.size <= most]
        region = min(fitting, key=lambda region: region.size, default=None)
        if region is not None:
            self._states[region] = "used"
        return region

    def give_back(self, region: Region) -> None:
        """Frees a region after Triton has answered the call. A no-op for a region that was retired in the meantime."""
        if self._states.get(region) == "used":
            region.used_at = time.monotonic()
            self._states[region] = "free"

    def retire(self, *regions: Region) -> None:
        self._states.update(dict.fromkeys(regions, "retired"))

    def retire_free(self, since: float = math.inf) -> None:
        """Retires the free regions that no call has used since then."""
        self.retire(*(region for region in self.those("free") if region.used_at <= since))

    def drop(self, region: Region) -> None:
        """Removes a region that Triton can no longer access, or that no call ever used."""
        self._states.pop(region, None)
