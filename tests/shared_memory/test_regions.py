"""Regions: their memory, their names, and the files of killed gateways, which the next gateway removes."""

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.shared_memory.leases import SharedMemory
from app.shared_memory.regions import (
    PREFIX,
    SHARED_MEMORY,
    Owner,
    Region,
    is_abandoned,
    remove_leftovers,
    rounded,
)
from app.triton.connect import open_transport, registry_of
from tests.shared_memory.conftest import MIB
from tests.toolkit.triton import FakeTriton, serving
from tests.toolkit.waiting import until

KILLED = """
import os, signal
from app.shared_memory.regions import Owner, Region
region = Region(Owner().next_name(), 4096)
region.allocate()
print(region.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.release()


@pytest.fixture
def region(owner: Owner) -> Region:
    return Region(owner.next_name(), MIB)


def test_the_memory_is_allocated_at_once_for_the_owner_only_and_stays_without_its_file(region: Region) -> None:
    """If a page were missing later, an access would kill the process."""
    region.allocate()
    assert region.path.stat().st_blocks * 512 >= MIB
    assert region.path.stat().st_mode & 0o777 == 0o600
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


def files_of(name: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{name.rpartition('_')[0]}*"))


def test_an_owner_without_regions_has_no_file() -> None:
    before = set(SHARED_MEMORY.glob(f"{PREFIX}*"))
    Owner().release()
    assert set(SHARED_MEMORY.glob(f"{PREFIX}*")) == before


def test_names_are_unique(owner: Owner) -> None:
    other = Owner()
    names = [owner.next_name(), owner.next_name(), other.next_name()]
    other.release()
    assert len(set(names)) == 3


def test_regions_of_a_running_gateway_stay_until_it_releases_them(owner: Owner, region: Region) -> None:
    region.allocate()
    remove_leftovers()
    assert region.path.exists()
    assert not is_abandoned(region.name)
    owner.release()
    assert files_of(region.name) == []


def test_regions_of_a_killed_gateway_are_removed() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    name = killed.stdout.strip()
    assert len(files_of(name)) == 2
    assert is_abandoned(name)
    remove_leftovers()
    assert files_of(name) == []
    assert not is_abandoned("region_of_another_client")


async def test_the_next_gateway_removes_them_at_its_start(own_files: Callable[[], list[Path]]) -> None:
    """Otherwise they would stay until it sends its first large tensor."""
    async with serving(FakeTriton()) as triton, open_transport(triton.url) as transport:
        (SHARED_MEMORY / f"{PREFIX}dead.lock").touch()
        (SHARED_MEMORY / f"{PREFIX}dead_1").touch()
        running = asyncio.create_task(SharedMemory(registry_of(transport), MIB, MIB).run())
        await until(lambda: not own_files())
        running.cancel()


def test_a_lock_file_that_was_removed_before_it_was_locked_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gateway may take it for a leftover. Then the regions would count as abandoned."""
    owner, lock = Owner(), fcntl.flock

    def remove_and_lock(descriptor: int, operation: int) -> None:
        Path(f"/proc/self/fd/{descriptor}").readlink().unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with pytest.raises(OSError, match="No such file"):
        owner.next_name()
    monkeypatch.undo()
    name = owner.next_name()
    assert not is_abandoned(name)
    owner.release()
