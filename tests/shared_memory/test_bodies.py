"""Bodies that are received directly into regions, so that their tensors need no copy."""

import asyncio

import numpy as np
import pytest

from app.core.errors import DeadlineExceeded
from app.core.inference import BYTES, ELEMENT, Tensor, bytes_array
from tests.shared_memory.stage import LARGE_BYTES, MIB, Stage, never, not_found_or, numbers, seen_by

ROOM = MIB - 1024
"""The size of a body that fits into a region of 1 MiB."""


def file_of(content: bytes | memoryview) -> Tensor:
    return Tensor("X", BYTES, bytes_array([content], (1,)))  # type: ignore[list-item]


def raw(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def body_of(stage: Stage, content: bytes) -> memoryview:
    memory = stage.shared_memory.bodies.take(len(content), ELEMENT)
    assert memory is not None
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
    assert seen == [raw(b"a" * ROOM), raw(b"b" * LARGE_BYTES)]
    assert stage.triton.shared.registered == 1
    assert stage.observed.ways == ["shared_memory"] * 3


async def test_a_body_and_a_large_tensor_have_different_regions(stage: Stage, seen: list[bytes]) -> None:
    body = body_of(stage, b"a" * ROOM)
    await stage.infer(file_of(body), numbers(2))
    assert seen == [raw(b"a" * ROOM)]
    first, second = stage.triton.requests[-1].inputs
    names = [each.parameters["shared_memory_region"].string_param for each in (first, second)]
    assert len(set(names)) == 2


async def test_a_part_of_a_body_is_copied(stage: Stage, seen: list[bytes]) -> None:
    body = body_of(stage, b"a" * ROOM)
    for part in (body[:-1], body[1:], bytes(body)):
        await stage.infer(file_of(part))
        assert seen[-1] == raw(bytes(part))
    assert stage.triton.shared.registered == 2


@pytest.mark.parametrize(("header", "gap", "regions"), [(0, 0, 1), (345, 0, 1), (345, 64, 1), (345, 4, 2)])
async def test_aligned_numbers_after_a_header_are_read_in_place(
    stage: Stage, seen: list[bytes], header: int, gap: int, regions: int
) -> None:
    body = stage.shared_memory.bodies.take(header + gap + LARGE_BYTES, header)
    assert body is not None
    sent = numbers(3).array.tobytes()
    body[header + gap :] = sent
    await stage.infer(Tensor("X", "FP32", np.frombuffer(body[header + gap :], np.float32)))
    assert seen == [sent]
    assert stage.triton.shared.registered == regions


async def test_reordered_and_small_arrays_are_copied(stage: Stage, seen: list[bytes]) -> None:
    body = stage.shared_memory.bodies.take(ROOM, 0)
    assert body is not None
    body[:] = bytes(range(256)) * (ROOM // 256)
    square = np.frombuffer(body[:LARGE_BYTES], np.float32).reshape(-1, 4).T
    few = np.frombuffer(body[LARGE_BYTES : LARGE_BYTES + 64], np.float32)
    await stage.infer(Tensor("X", "FP32", square), Tensor("Z", "FP32", few))
    assert seen == [square.tobytes()]
    assert list(stage.triton.requests[-1].raw_input_contents) == [few.tobytes()]
    assert stage.triton.shared.registered == 2


class TestLimits:
    async def test_a_small_body_gets_no_region(self, stage: Stage, seen: list[bytes]) -> None:
        assert stage.shared_memory.bodies.take(LARGE_BYTES - 1, ELEMENT) is None

    async def test_a_body_gets_no_region_if_none_is_large_enough(self, stage: Stage, seen: list[bytes]) -> None:
        assert stage.shared_memory.bodies.take(MIB, ELEMENT) is None
        body_of(stage, b"a" * ROOM)
        assert stage.shared_memory.bodies.take(ROOM, ELEMENT) is None

    async def test_bodies_use_at_most_half_of_the_lane(self, stage: Stage) -> None:
        await asyncio.gather(*(stage.infer(numbers(1, MIB // 4)) for _ in range(4)))
        bodies = [stage.shared_memory.bodies.take(ROOM, ELEMENT) for _ in range(4)]
        assert [body is None for body in bodies] == [False, False, True, True]
        await stage.infer(numbers(1, MIB // 4))
        assert stage.observed.ways == ["shared_memory"] * 5


class TestQuarantine:
    async def test_a_body_in_use_by_triton_is_not_overwritten(self, stage: Stage, seen: list[bytes]) -> None:
        body = body_of(stage, b"a" * ROOM)
        stage.triton.unary = never
        with pytest.raises(DeadlineExceeded):
            await stage.infer(file_of(body), seconds=0.05)
        stage.triton.shared.in_use.update(stage.triton.shared.regions)
        stage.shared_memory.bodies.give_back(body)
        assert stage.observed.bytes == (0, 0, MIB)
        assert stage.shared_memory.bodies.take(ROOM, ELEMENT) is None
        stage.triton.shared.in_use.clear()
        await stage.until(lambda: stage.observed.bytes == (0, 0, 0))

    async def test_a_restarted_triton_gets_the_body_over_grpc(self, stage: Stage) -> None:
        await stage.infer(numbers(1, MIB // 4))
        content = numbers(3, LARGE_BYTES // 2).array.tobytes()[:ROOM]
        body = body_of(stage, content)
        stage.triton.shared.forget()
        stage.triton.unary = not_found_or(stage.triton)
        await stage.infer(file_of(body))
        stage.shared_memory.bodies.give_back(body)
        assert list(stage.triton.requests[-1].raw_input_contents) == [raw(content)]
        assert stage.observed.ways == ["shared_memory", "shared_memory", "lost"]
        await stage.until(lambda: stage.observed.bytes == (0, 0, 0))
