"""A gateway removes the files of a killed gateway and no other files."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.triton.shared_memory.owner import PREFIX, Owner, is_abandoned, remove_leftovers
from app.triton.shared_memory.region import SHARED_MEMORY, Region

KILLED = """
import os, signal
from app.triton.shared_memory.owner import Owner
from app.triton.shared_memory.region import Region
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
