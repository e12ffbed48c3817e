"""Which tensors of a call use shared memory; regions: their memory, names, and the files of killed gateways."""

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from app.core.inference import BYTES, InferenceRequest, RequestedOutput, Tensor, bytes_array
from app.core.model import ModelConfig, Step, TensorSpec
from app.shared_memory.leases import SharedMemory
from app.shared_memory.regions import (
    LARGE_BYTES,
    PREFIX,
    SHARED_MEMORY,
    ByteRange,
    Layout,
    Layouts,
    Owner,
    Region,
    RegionPool,
    is_abandoned,
    remove_leftovers,
    rounded,
)
from app.triton.connect import MAX_MESSAGE_BYTES, open_transport, registry_of
from tests.shared_memory.conftest import MIB
from tests.toolkit.triton import FakeTriton, serving
from tests.toolkit.waiting import until

LARGE = LARGE_BYTES // 4


def numbers(count: int = LARGE, name: str = "X") -> Tensor:
    return Tensor(name, "FP32", np.zeros(count, np.float32))


def model(
    name: str = "m",
    *outputs: TensorSpec,
    max_batch_size: int = 0,
    steps: tuple[Step, ...] = (),
    decoupled: bool = False,
) -> ModelConfig:
    inputs = (TensorSpec("X", "FP32", (-1,)), TensorSpec("NOTE", "FP32", (-1,)))
    return ModelConfig(name, "python", max_batch_size, inputs, outputs, steps=steps, decoupled=decoupled)


def layout(*configs: ModelConfig, inputs: tuple[Tensor, ...] = (numbers(),)) -> Layout | None:
    layouts = Layouts(MAX_MESSAGE_BYTES)
    for config in configs:
        layouts.learn(config, "")
    return layouts.layout_of(InferenceRequest("m", inputs))


FILE = Tensor("X", BYTES, bytes_array([b"a" * LARGE_BYTES], (1,)))


@pytest.mark.parametrize(
    ("inputs", "places", "size"),
    [
        ([numbers()], [(0, LARGE_BYTES)], LARGE_BYTES),
        ([numbers(1, "NOTE"), numbers()], [None, (0, LARGE_BYTES)], LARGE_BYTES),
        (
            [numbers(LARGE + 1), numbers(LARGE, "NOTE")],
            [(0, LARGE_BYTES + 4), (LARGE_BYTES + 64, LARGE_BYTES)],
            2 * LARGE_BYTES + 64,
        ),
        ([FILE], [(0, LARGE_BYTES + 4)], LARGE_BYTES + 4),
    ],
    ids=["a large input", "only the large one of two", "aligned", "bytes with their lengths"],
)
def test_large_inputs_have_a_place(inputs: list[Tensor], places: list[tuple[int, int] | None], size: int) -> None:
    ranges = tuple(place and ByteRange(*place) for place in places)
    assert layout(model(), inputs=tuple(inputs)) == Layout(ranges, (), size)


@pytest.mark.parametrize(
    ("models", "inputs"),
    [
        ([model()], [numbers(LARGE - 1)]),
        ([model()], [Tensor("X", BYTES, bytes_array([b"a" * LARGE_BYTES] * 65, (65,)))]),
        ([], [numbers()]),
        ([model()], [numbers(MAX_MESSAGE_BYTES // 4), numbers(LARGE, "NOTE")]),
        ([model("m", TensorSpec("Y", "FP32", (-1, LARGE)))], []),
        ([model("m", TensorSpec("Y", BYTES, (LARGE,)))], []),
        ([model("m", TensorSpec("Y", "INVALID", ()))], []),
    ],
    ids=[
        "small",
        "many elements of bytes",
        "an unknown model",
        "too large for Triton, which rejects it",
        *("an output of any size", "an output of bytes", "an output without a datatype"),
    ],
)
def test_these_requests_use_grpc(models: list[ModelConfig], inputs: list[Tensor]) -> None:
    assert layout(*models, inputs=tuple(inputs)) is None


class TestOutputs:
    def test_an_output_of_fixed_size_has_a_place(self) -> None:
        found = layout(model("m", TensorSpec("Y", "FP64", (LARGE,)), TensorSpec("Z", "FP32", (1,))), inputs=())
        assert found == Layout((), (("Y", ByteRange(0, 2 * LARGE_BYTES)), ("Z", None)), 2 * LARGE_BYTES)

    def test_only_requested_outputs_have_a_place(self) -> None:
        layouts = Layouts(MAX_MESSAGE_BYTES)
        layouts.learn(model("m", TensorSpec("Y", "FP32", (LARGE,)), TensorSpec("Z", "FP32", (LARGE,))), "")
        for outputs, named in (
            ((RequestedOutput("Z"),), (("Z", ByteRange(0, LARGE_BYTES)),)),
            ((RequestedOutput("Y"), RequestedOutput("Z", 3)), (("Y", ByteRange(0, LARGE_BYTES)), ("Z", None))),
        ):
            found = layouts.layout_of(InferenceRequest("m", (numbers(1),), outputs=outputs))
            assert found == Layout((None,), named, LARGE_BYTES)
        assert layouts.layout_of(InferenceRequest("m", (numbers(1),), outputs=(RequestedOutput("Z", 3),))) is None

    def test_outputs_of_an_unknown_model_use_grpc(self) -> None:
        request = InferenceRequest("m", (numbers(1),), version="1", outputs=(RequestedOutput("Y"),))
        assert Layouts(MAX_MESSAGE_BYTES).layout_of(request) is None

    def test_an_output_has_room_for_each_item_of_the_batch(self) -> None:
        batch = Tensor("X", "FP32", np.zeros((3, 1), np.float32))
        found = layout(model("m", TensorSpec("Y", "FP32", (LARGE,)), max_batch_size=4), inputs=(batch,))
        assert found.outputs == (("Y", ByteRange(0, 3 * LARGE_BYTES)),)


def step(name: str, reads: str, writes: str) -> Step:
    return Step(name, "", tuple((each, each) for each in reads.split()), tuple((each, each) for each in writes.split()))


FAN_OUT = (step("a", "X", "M"), step("b", "M", "Y"), step("c", "M NOTE", "Z"))
NESTED = (model("inner", steps=(step("a", "X", "Y"), step("b", "X", "Z"))), model("a"), model("b"))
OUTPUTS = (TensorSpec("Y", "FP32", (LARGE,)), TensorSpec("Z", "FP32", (1,)))


@pytest.mark.parametrize(
    ("ensemble", "others", "inputs", "has_places"),
    [
        (model(steps=(step("a", "X", "M"), step("b", "X M", "Y"))), [*map(model, "ab")], [numbers()], True),
        (model(steps=(step("a", "X", "Y"), step("b", "X", "Z"))), [*map(model, "ab")], [numbers()], False),
        (model(steps=FAN_OUT), [*map(model, "abc")], [numbers()], True),
        (model(steps=FAN_OUT), [*map(model, "abc")], [numbers(LARGE, "NOTE")], False),
        (model("m", *OUTPUTS, steps=FAN_OUT), [*map(model, "abc")], [], False),
        (model(steps=(step("inner", "X", "Y"),)), NESTED, [numbers()], False),
        (model(steps=(step("a", "X", "Y"),), decoupled=True), [model("a")], [numbers()], False),
        (model(steps=(step("a", "X", "Y"),)), [], [numbers()], False),
    ],
    ids=[
        "a chain",
        "parallel steps may still read the input",
        "parallel steps read intermediate tensors",
        "one of several parallel steps reads the input",
        "parallel steps may still write an output",
        "the steps of a nested ensemble",
        "a decoupled ensemble",
        "an unknown step",
    ],
)
def test_which_ensembles_use_shared_memory(
    ensemble: ModelConfig, others: Sequence[ModelConfig], inputs: list[Tensor], *, has_places: bool
) -> None:
    """An ensemble ends as soon as one step fails, while parallel steps continue."""
    assert (layout(ensemble, *others, inputs=tuple(inputs)) is not None) is has_places


def test_a_reloaded_model_changes_the_layout() -> None:
    layouts = Layouts(MAX_MESSAGE_BYTES)
    request = InferenceRequest("m", (numbers(),))
    for name in "ab":
        layouts.learn(model(name), "")
    layouts.learn(model(steps=(step("a", "X", "Y"), step("b", "X", "Z"))), "")
    assert layouts.layout_of(request) is None
    layouts.learn(model(), "")
    assert layouts.layout_of(request) is not None


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


def test_only_free_regions_that_no_call_has_used_since_then_are_retired() -> None:
    pool, (idle, recent, used) = RegionPool(3), (Region(name, 1) for name in ("idle", "recent", "used"))
    for region in (idle, recent, used):
        pool.add(region)
    pool.give_back(idle)
    pool.give_back(recent)
    pool.retire_free((idle.used_at + recent.used_at) / 2)
    assert (pool.those("free"), pool.those("used"), pool.those("retired")) == ([recent], [used], [idle])
    pool.retire_free()
    assert pool.those("retired") == [idle, recent]


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
