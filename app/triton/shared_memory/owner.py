"""Records which process owns a region, so that the next gateway can remove the regions of a killed gateway."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.triton.shared_memory.region import SHARED_MEMORY

PREFIX = "triton_gateway_lane_"


class Owner:
    """Holds the lock of an empty file while the process runs. The kernel releases the lock when the process ends.

    A process id is not sufficient: gateways in different containers share ``/dev/shm``, but not their process ids.
    """

    def __init__(self) -> None:
        self._token = ""
        self._descriptor: int | None = None
        self._count = 0

    def next_name(self) -> str:
        """Returns a unique name. Raises OSError."""
        if self._descriptor is None:
            token = secrets.token_hex(8)
            self._token, self._descriptor = token, _locked(token)
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


def _lock_file(token: str) -> str:
    return str(SHARED_MEMORY / f"{PREFIX}{token}.lock")


def _locked(token: str) -> int:
    """Creates and locks the file. Raises OSError, also if another gateway removed the file before it was locked."""
    path = _lock_file(token)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(path).stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _has_ended(token: str) -> Iterator[bool]:
    """Yields whether the process of this owner has ended. If so, holds its lock for the duration of the block."""
    try:
        descriptor = os.open(_lock_file(token), os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        yield isinstance(exc, FileNotFoundError)
        return
    try:
        yield _can_lock(descriptor)
    finally:
        os.close(descriptor)


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_files(token: str) -> None:
    for path in SHARED_MEMORY.glob(f"{PREFIX}{token}*"):
        with suppress(OSError):
            path.unlink()


def _token_of(name: str) -> str:
    """Returns the owner's token in the name of a region or a lock file."""
    return name.removeprefix(PREFIX).partition("_")[0].partition(".")[0]
