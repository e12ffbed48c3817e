"""A region allocates its memory at once and leaves half of the file system free."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from app.shared_memory.regions import Owner, Region, rounded

MIB = 1024 * 1024


@pytest.fixture
def region() -> Iterator[Region]:
    owner = Owner()
    yield Region(owner.next_name(), MIB)
    owner.release()


def test_only_the_owner_can_open_the_file(region: Region) -> None:
    region.allocate()
    assert region.path.stat().st_mode & 0o777 == 0o600


def test_the_memory_is_allocated_at_once(region: Region) -> None:
    """If a page were missing later, an access would kill the process."""
    region.allocate()
    assert region.path.stat().st_blocks * 512 >= MIB


def test_the_memory_stays_after_the_file_is_removed(region: Region) -> None:
    region.allocate()
    region.unlink()
    region.view[:3] = b"abc"
    assert bytes(region.view[:3]) == b"abc"
    assert not region.path.exists()


@pytest.mark.parametrize(("free_mib", "is_made"), [(33, True), (32, False)])
def test_half_of_the_file_system_stays_free(
    region: Region, monkeypatch: pytest.MonkeyPatch, free_mib: int, is_made: bool
) -> None:
    system = SimpleNamespace(f_bavail=free_mib * 256, f_frsize=4096, f_blocks=64 * 256)
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    if is_made:
        region.allocate()
    else:
        with pytest.raises(OSError, match="half of /dev/shm has to stay free"):
            region.allocate()
    assert region.path.exists() is is_made


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 16 * MIB + 4, 64 * MIB])
def test_sizes_are_rounded_up_by_at_most_a_quarter(size: int) -> None:
    assert size <= rounded(size) <= max(size * 1.25, 256 * 1024)
    assert rounded(size) % 4096 == 0
