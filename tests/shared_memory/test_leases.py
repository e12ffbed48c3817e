"""Large tensors through shared memory, with a real gRPC server that maps the regions like Triton."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from app.core.errors import GatewayError, ModelError
from app.core.inference import BYTES, ELEMENT, KeptMemory, Tensor, bytes_array
from app.shared_memory.regions import LARGE_BYTES
from tests.live.side_by_side import raw_texts
from tests.shared_memory.conftest import LARGE, MIB, Stage, failing, not_found_or, numbers, region_of, seen_by
from tests.toolkit.waiting import until


async def test_only_the_large_inputs_of_a_request_use_shared_memory(
    stage: Stage, own_files: Callable[[], list[Path]]
) -> None:
    """A registered region has no file."""
    response = await stage.infer(numbers(1), numbers(3, 1, "NOTE"))
    assert response.outputs["Y"].array.tolist() == [LARGE]
    await stage.infer(numbers(1, 4))
    request, small = stage.triton.requests
    assert [len(raw) for raw in request.raw_input_contents] == [4]
    assert not request.inputs[1].parameters
    assert [len(raw) for raw in small.raw_input_contents] == [16]
    assert (stage.observed.ways, stage.triton.shared.registered) == (["shared_memory"], 1)
    assert [path.suffix for path in own_files()] == [".lock"]


ELEMENTS = [b"a" * LARGE_BYTES, b"", b"\0b"]
ARRAY = np.arange(2 * LARGE, dtype=np.float32).reshape(2, LARGE).T


@pytest.mark.parametrize(
    ("tensor", "written"),
    [
        (Tensor("X", BYTES, bytes_array(ELEMENTS, (3,))), raw_texts(*ELEMENTS)),
        (Tensor("X", "FP32", ARRAY), ARRAY.tobytes()),
    ],
    ids=["bytes with their lengths", "an array in any memory order, row by row"],
)
async def test_how_a_tensor_is_written(stage: Stage, tensor: Tensor, written: bytes) -> None:
    seen = seen_by(stage.triton)
    await stage.infer(tensor)
    assert seen == [written]


async def test_an_output_of_fixed_size_uses_shared_memory_and_is_not_changed_by_the_next_call(stage: Stage) -> None:
    outputs = (await stage.infer(numbers(2), model="fixed")).outputs
    assert set(outputs) == {"Y", "Z"}
    await stage.infer(numbers(1), model="fixed")
    assert outputs["Y"].array.tolist() == [2 * LARGE] * LARGE
    assert outputs["Z"].array.tolist() == [2 * LARGE]
    assert stage.triton.shared.registered == 1


async def test_a_kept_output_is_read_in_place_by_the_next_call_until_it_is_released(stage: Stage) -> None:
    kept = KeptMemory()
    output = (await stage.infer(numbers(2), model="fixed", kept=kept)).outputs["Y"]
    _, used, _ = stage.observed.bytes
    assert used > LARGE_BYTES
    assert await stage.sum_of(replace(output, name="X")) == 2 * LARGE * LARGE
    first, second = stage.regions
    assert first == second
    kept.release()
    assert stage.observed.bytes == (used, 0, 0)
    await stage.infer(numbers(1), model="fixed")
    assert stage.triton.shared.registered == 1


async def test_concurrent_calls_have_different_regions(stage: Stage) -> None:
    sums = await asyncio.gather(*(stage.sum_of(numbers(value)) for value in range(8)))
    assert sums == [value * LARGE for value in range(8)]
    assert len(set(stage.regions)) == len(stage.regions) == 8


class TestLimit:
    async def test_tensors_without_room_use_grpc(self, stage: Stage) -> None:
        large = numbers(1, 5 * LARGE)
        assert await asyncio.gather(stage.sum_of(large), stage.sum_of(large)) == [5 * LARGE] * 2
        assert sorted(stage.observed.ways) == ["full", "shared_memory"]

    async def test_free_regions_make_room_for_a_larger_one(self, stage: Stage) -> None:
        await asyncio.gather(*(stage.infer(numbers(1)) for _ in range(8)))
        await stage.infer(numbers(1, 5 * LARGE))
        assert stage.observed.ways[-1] == "full"
        await until(lambda: stage.observed.bytes == (0, 0, 0))
        await stage.infer(numbers(1, 5 * LARGE))
        assert stage.observed.ways[-1] == "shared_memory"


class TestQuarantine:
    async def test_a_region_in_use_by_triton_is_not_reused(self, stage: Stage) -> None:
        await stage.abandon()
        (abandoned,) = stage.triton.shared.regions
        for value in (1, 2):
            assert await stage.sum_of(numbers(value)) == value * LARGE
        assert abandoned not in stage.regions[1:]
        assert stage.observed.bytes == (LARGE_BYTES, 0, LARGE_BYTES)
        stage.triton.shared.in_use.clear()
        await until(lambda: stage.observed.bytes == (LARGE_BYTES, 0, 0))
        assert abandoned not in stage.triton.shared.regions

    @pytest.mark.parametrize(
        ("code", "error", "held"),
        [
            (grpc.StatusCode.ALREADY_EXISTS, ModelError, (LARGE_BYTES, 0, 0)),
            (grpc.StatusCode.INTERNAL, GatewayError, (0, 0, LARGE_BYTES)),
            (grpc.StatusCode.UNAVAILABLE, GatewayError, (0, 0, LARGE_BYTES)),
            (grpc.StatusCode.UNKNOWN, GatewayError, (0, 0, LARGE_BYTES)),
        ],
    )
    async def test_an_answer_of_triton_frees_the_region_and_an_error_of_grpc_quarantines_it(
        self, stage: Stage, code: grpc.StatusCode, error: type[GatewayError], held: tuple[int, int, int]
    ) -> None:
        stage.triton.unary = failing(code)
        with pytest.raises(error):
            await stage.infer()
        assert stage.observed.bytes == held

    async def test_quarantine_counts_against_the_limit(self, stage: Stage) -> None:
        for _ in range(2):
            await stage.abandon(numbers(1, 4 * LARGE))
        assert await stage.sum_of(numbers(1, 4 * LARGE)) == 4 * LARGE
        assert stage.observed.ways == ["shared_memory", "shared_memory", "full"]

    async def test_regions_of_an_old_triton_are_not_unregistered(self, stage: Stage) -> None:
        """Triton before 2.50 would unmap a region that a model still uses, and crash."""
        stage.triton.shared.version = "2.49.0"
        await stage.abandon()
        await asyncio.sleep(0.2)
        assert stage.triton.shared.unregistered == []
        stage.triton.shared.forget()
        await until(lambda: stage.observed.bytes == (0, 0, 0))


class TestFallback:
    async def test_a_failed_registration_is_logged_once_and_retried(
        self, stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage.triton.shared.refusal = "Unable to open shared memory region: '/x'"
        for value in (1, 2):
            assert await stage.sum_of(numbers(value)) == value * LARGE
        assert caplog.text.count("no shared memory for large tensors") == 1
        stage.triton.shared.refusal = ""
        monkeypatch.setattr(stage.shared_memory._backoff, "due_at", 0.0)
        with caplog.at_level("INFO"):
            await stage.infer()
        assert stage.observed.ways == ["unavailable", "unavailable", "shared_memory"]
        assert stage.observed.bytes == (LARGE_BYTES, 0, 0), "without the region that was not registered"
        assert "sent through shared memory" in caplog.text

    async def test_a_full_file_system_means_unavailable(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        await stage.infer()
        assert stage.observed.ways == ["unavailable"]

    async def test_no_request_fails_after_a_restart_of_triton(self, stage: Stage) -> None:
        await stage.infer()
        stage.triton.shared.forget()
        stage.triton.unary = not_found_or(stage.triton)
        for value in (2, 3):
            assert await stage.sum_of(numbers(value)) == value * LARGE
        assert stage.observed.ways == ["shared_memory", "shared_memory", "lost", "shared_memory"]
        await until(lambda: stage.observed.bytes == (LARGE_BYTES, 0, 0))


ROOM = MIB - 1024
"""The size of a body that fits into a region of 1 MiB."""


def file_of(content: bytes | memoryview) -> Tensor:
    return Tensor("X", BYTES, bytes_array([content], (1,)))  # type: ignore[list-item]


def body_of(stage: Stage, content: bytes) -> memoryview:
    memory = stage.shared_memory.bodies.take(len(content), ELEMENT)
    memory[:] = content
    return memory


@pytest.fixture
async def seen(stage: Stage) -> list[bytes]:
    """The inputs that the model reads; a first call has created a free region of 1 MiB."""
    await stage.infer(numbers(1, MIB // 4))
    return seen_by(stage.triton)


async def test_a_body_is_read_in_place(stage: Stage, seen: list[bytes]) -> None:
    for content in (b"a" * ROOM, b"b" * LARGE_BYTES):
        body = body_of(stage, content)
        await stage.infer(file_of(body))
        assert stage.observed.bytes == (0, MIB, 0)
        stage.shared_memory.bodies.give_back(body)
        assert stage.observed.bytes == (MIB, 0, 0)
    assert seen == [raw_texts(b"a" * ROOM), raw_texts(b"b" * LARGE_BYTES)]
    assert stage.triton.shared.registered == 1
    assert stage.observed.ways == ["shared_memory"] * 3


async def test_a_body_and_a_large_tensor_have_different_regions(stage: Stage, seen: list[bytes]) -> None:
    body = body_of(stage, b"a" * ROOM)
    await stage.infer(file_of(body), numbers(2))
    assert seen == [raw_texts(b"a" * ROOM)]
    first, second = stage.triton.requests[-1].inputs
    assert region_of(first) != region_of(second)


async def test_a_part_of_a_body_is_copied(stage: Stage, seen: list[bytes]) -> None:
    body = body_of(stage, b"a" * ROOM)
    for part in (body[:-1], body[1:], bytes(body)):
        await stage.infer(file_of(part))
        assert seen[-1] == raw_texts(bytes(part))
    assert stage.triton.shared.registered == 2


@pytest.mark.parametrize(("header", "gap", "regions"), [(0, 0, 1), (345, 0, 1), (345, 64, 1), (345, 4, 2)])
async def test_aligned_numbers_after_a_header_are_read_in_place(
    stage: Stage, seen: list[bytes], header: int, gap: int, regions: int
) -> None:
    body = stage.shared_memory.bodies.take(header + gap + LARGE_BYTES, header)
    sent = numbers(3).array.tobytes()
    body[header + gap :] = sent
    await stage.infer(Tensor("X", "FP32", np.frombuffer(body[header + gap :], np.float32)))
    assert seen == [sent]
    assert stage.triton.shared.registered == regions


async def test_reordered_and_small_arrays_are_copied(stage: Stage, seen: list[bytes]) -> None:
    body = stage.shared_memory.bodies.take(ROOM, 0)
    body[:] = bytes(range(256)) * (ROOM // 256)
    square = np.frombuffer(body[:LARGE_BYTES], np.float32).reshape(-1, 4).T
    few = np.frombuffer(body[LARGE_BYTES : LARGE_BYTES + 64], np.float32)
    await stage.infer(Tensor("X", "FP32", square), Tensor("Z", "FP32", few))
    assert seen == [square.tobytes()]
    assert list(stage.triton.requests[-1].raw_input_contents) == [few.tobytes()]
    assert stage.triton.shared.registered == 2


class TestLimitsOfBodies:
    async def test_a_body_gets_no_region_if_it_is_small_or_none_is_large_enough(
        self, stage: Stage, seen: list[bytes]
    ) -> None:
        for size in (LARGE_BYTES - 1, MIB):
            assert stage.shared_memory.bodies.take(size, ELEMENT) is None
        body_of(stage, b"a" * ROOM)
        assert stage.shared_memory.bodies.take(ROOM, ELEMENT) is None

    async def test_bodies_use_at_most_half_of_the_lane(self, stage: Stage) -> None:
        await asyncio.gather(*(stage.infer(numbers(1, MIB // 4)) for _ in range(4)))
        bodies = [stage.shared_memory.bodies.take(ROOM, ELEMENT) for _ in range(4)]
        assert [body is None for body in bodies] == [False, False, True, True]
        await stage.infer(numbers(1, MIB // 4))
        assert stage.observed.ways == ["shared_memory"] * 5

    async def test_kept_outputs_leave_the_half_of_bodies(self, stage: Stage) -> None:
        await asyncio.gather(*(stage.infer(numbers(1, MIB // 4)) for _ in range(4)))
        await stage.infer(numbers(1), model="fixed", kept=KeptMemory())
        assert stage.observed.bytes == (3 * MIB, MIB, 0)
        bodies = [stage.shared_memory.bodies.take(ROOM, ELEMENT) for _ in range(3)]
        assert [body is None for body in bodies] == [False, False, True]


class TestQuarantineOfBodies:
    async def test_a_body_in_use_by_triton_is_not_overwritten(self, stage: Stage, seen: list[bytes]) -> None:
        body = body_of(stage, b"a" * ROOM)
        await stage.abandon(file_of(body))
        stage.shared_memory.bodies.give_back(body)
        assert stage.observed.bytes == (0, 0, MIB)
        assert stage.shared_memory.bodies.take(ROOM, ELEMENT) is None
        stage.triton.shared.in_use.clear()
        await until(lambda: stage.observed.bytes == (0, 0, 0))

    async def test_a_restarted_triton_gets_the_body_over_grpc(self, stage: Stage) -> None:
        await stage.infer(numbers(1, MIB // 4))
        content = numbers(3, LARGE_BYTES // 2).array.tobytes()[:ROOM]
        body = body_of(stage, content)
        stage.triton.shared.forget()
        stage.triton.unary = not_found_or(stage.triton)
        await stage.infer(file_of(body))
        stage.shared_memory.bodies.give_back(body)
        assert list(stage.triton.requests[-1].raw_input_contents) == [raw_texts(content)]
        assert stage.observed.ways == ["shared_memory", "shared_memory", "lost"]
        await until(lambda: stage.observed.bytes == (0, 0, 0))
