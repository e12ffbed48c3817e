"""A gateway removes the files of a killed gateway and no other files."""

import asyncio
import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.observability.metrics import Metrics, SharedMemoryMetrics
from app.shared_memory.leases import SharedMemory
from app.shared_memory.regions import PREFIX, SHARED_MEMORY, Owner, Region, is_abandoned, remove_leftovers
from app.triton.connect import open_transport, registry_of
from tests.shared_memory.stage import MIB
from tests.toolkit.triton import FakeTriton, serving

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


def test_regions_of_a_running_gateway_stay(owner: Owner) -> None:
    region = Region(owner.next_name(), 4096)
    region.allocate()
    remove_leftovers()
    assert region.path.exists()
    assert not is_abandoned(region.name)


def test_release_removes_every_file(owner: Owner) -> None:
    region = Region(owner.next_name(), 4096)
    region.allocate()
    owner.release()
    assert files_of(region.name) == []


def test_regions_of_a_killed_gateway_are_removed() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    name = killed.stdout.strip()
    assert len(files_of(name)) == 2
    assert is_abandoned(name)
    remove_leftovers()
    assert files_of(name) == []


def test_regions_of_other_clients_are_not_abandoned() -> None:
    assert not is_abandoned("region_of_another_client")


async def test_the_next_gateway_removes_them_at_its_start(own_files: Callable[[], list[Path]]) -> None:
    """Otherwise they would stay until it sends its first large tensor."""
    async with serving(FakeTriton()) as triton, open_transport(triton.url) as transport:
        (SHARED_MEMORY / f"{PREFIX}dead.lock").touch()
        (SHARED_MEMORY / f"{PREFIX}dead_1").touch()
        running = asyncio.create_task(
            SharedMemory(registry_of(transport), MIB, MIB, SharedMemoryMetrics(Metrics("test"))).run()
        )
        async with asyncio.timeout(5):
            while own_files():
                await asyncio.sleep(0.01)
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
