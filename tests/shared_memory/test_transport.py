"""The transport with a real gRPC server that maps the regions like Triton."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from app.core.errors import DeadlineExceeded, GatewayError, ModelError
from app.core.inference import BYTES, Tensor, bytes_array
from app.shared_memory.layout import LARGE_BYTES
from tests.shared_memory.stage import LARGE, Stage, failing, never, not_found_or, numbers, seen_by, sum_of


async def test_a_large_input_is_sent_through_shared_memory(stage: Stage) -> None:
    response = await stage.infer(numbers(1))
    assert response.outputs["Y"].array.tolist() == [LARGE]
    (request,) = stage.triton.requests
    assert list(request.raw_input_contents) == []
    assert stage.observed.ways == ["shared_memory"]


async def test_a_small_input_of_the_same_request_uses_grpc(stage: Stage) -> None:
    await stage.infer(numbers(1), numbers(3, 1, "NOTE"))
    (request,) = stage.triton.requests
    assert [len(raw) for raw in request.raw_input_contents] == [4]
    assert not request.inputs[1].parameters


async def test_a_small_request_does_not_use_the_lane(stage: Stage) -> None:
    await stage.infer(numbers(1, 4))
    assert stage.observed.ways == []
    assert stage.triton.shared.registered == 0


async def test_bytes_are_written_with_their_lengths(stage: Stage) -> None:
    seen = seen_by(stage.triton)
    elements = [b"a" * LARGE_BYTES, b"", b"\0b"]
    await stage.infer(Tensor("X", BYTES, bytes_array(elements, (3,))))
    assert seen == [b"".join(len(each).to_bytes(4, "little") + each for each in elements)]


async def test_an_array_of_any_memory_order_is_written_row_by_row(stage: Stage) -> None:
    seen = seen_by(stage.triton)
    array = np.arange(2 * LARGE, dtype=np.float32).reshape(2, LARGE).T
    await stage.infer(Tensor("X", "FP32", array))
    assert seen == [array.tobytes()]


async def test_an_output_of_fixed_size_uses_shared_memory(stage: Stage) -> None:
    outputs = (await stage.infer(numbers(2), model="fixed")).outputs
    assert set(outputs) == {"Y", "Z"}
    assert outputs["Y"].array.tolist() == [2 * LARGE] * LARGE
    assert outputs["Z"].array.tolist() == [2 * LARGE]


async def test_an_output_is_not_changed_by_the_next_call(stage: Stage) -> None:
    first = await stage.infer(numbers(1), model="fixed")
    await stage.infer(numbers(2), model="fixed")
    assert first.outputs["Y"].array[0] == LARGE
    assert stage.triton.shared.registered == 1


async def test_consecutive_calls_share_a_region(stage: Stage) -> None:
    for value in (1, 2, 3):
        assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
    assert stage.triton.shared.registered == 1
    assert stage.observed.bytes == (LARGE_BYTES, 0, 0)


async def test_concurrent_calls_have_different_regions(stage: Stage) -> None:
    responses = await asyncio.gather(*(stage.infer(numbers(value)) for value in range(8)))
    assert [response.outputs["Y"].array[0] for response in responses] == [value * LARGE for value in range(8)]
    names = [request.inputs[0].parameters["shared_memory_region"].string_param for request in stage.triton.requests]
    assert len(set(names)) == len(names)


async def test_a_registered_region_has_no_file(stage: Stage, own_files: Callable[[], list[Path]]) -> None:
    await stage.infer()
    assert [path.suffix for path in own_files()] == [".lock"]


class TestLimit:
    async def test_tensors_without_room_use_grpc(self, stage: Stage) -> None:
        large = numbers(1, 5 * LARGE)
        responses = await asyncio.gather(stage.infer(large), stage.infer(large))
        assert [response.outputs["Y"].array.tolist() for response in responses] == [[5 * LARGE]] * 2
        assert sorted(stage.observed.ways) == ["full", "shared_memory"]

    async def test_free_regions_make_room_for_a_larger_one(self, stage: Stage) -> None:
        await asyncio.gather(*(stage.infer(numbers(1)) for _ in range(8)))
        await stage.infer(numbers(1, 5 * LARGE))
        assert stage.observed.ways[-1] == "full"
        await stage.until(lambda: stage.observed.bytes == (0, 0, 0))
        await stage.infer(numbers(1, 5 * LARGE))
        assert stage.observed.ways[-1] == "shared_memory"


class TestQuarantine:
    async def test_a_region_in_use_by_triton_is_not_reused(self, stage: Stage) -> None:
        answering = stage.triton.unary
        stage.triton.unary = never
        with pytest.raises(DeadlineExceeded):
            await stage.infer(seconds=0.05)
        (abandoned,) = stage.triton.shared.regions
        stage.triton.shared.in_use.add(abandoned)
        stage.triton.unary = answering
        for value in (1, 2):
            assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
        used = {
            request.inputs[0].parameters["shared_memory_region"].string_param for request in stage.triton.requests[1:]
        }
        assert abandoned not in used
        assert stage.observed.bytes == (LARGE_BYTES, 0, LARGE_BYTES)
        stage.triton.shared.in_use.clear()
        await stage.until(lambda: stage.observed.bytes == (LARGE_BYTES, 0, 0))
        assert abandoned not in stage.triton.shared.regions

    async def test_the_region_of_a_cancelled_call_is_quarantined(self, stage: Stage) -> None:
        stage.triton.unary = never
        call = asyncio.create_task(stage.infer())
        await stage.until(lambda: len(stage.triton.requests) == 1)
        stage.triton.shared.in_use.update(stage.triton.shared.regions)
        call.cancel()
        await stage.until(lambda: stage.observed.bytes == (0, 0, LARGE_BYTES))

    async def test_an_answer_with_an_error_frees_the_region(self, stage: Stage) -> None:
        stage.triton.unary = failing(grpc.StatusCode.ALREADY_EXISTS)
        with pytest.raises(ModelError):
            await stage.infer()
        assert stage.observed.bytes == (LARGE_BYTES, 0, 0)

    @pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN])
    async def test_an_error_of_grpc_itself_quarantines_the_region(self, stage: Stage, code: grpc.StatusCode) -> None:
        stage.triton.unary = failing(code)
        with pytest.raises(GatewayError):
            await stage.infer()
        assert stage.observed.bytes == (0, 0, LARGE_BYTES)

    async def test_quarantine_counts_against_the_limit(self, stage: Stage) -> None:
        stage.triton.unary = never
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                await stage.infer(numbers(1, 4 * LARGE), seconds=0.05)
            stage.triton.shared.in_use.update(stage.triton.shared.regions)
        stage.triton.unary = sum_of(stage.triton)
        assert (await stage.infer(numbers(1, 4 * LARGE))).outputs["Y"].array.tolist() == [4 * LARGE]
        assert stage.observed.ways == ["shared_memory", "shared_memory", "full"]

    async def test_regions_of_an_old_triton_are_not_unregistered(self, stage: Stage) -> None:
        """Triton before 2.50 would unmap a region that a model still uses, and crash."""
        stage.triton.shared.version = "2.49.0"
        stage.triton.unary = never
        with pytest.raises(DeadlineExceeded):
            await stage.infer(seconds=0.05)
        await asyncio.sleep(0.2)
        assert stage.triton.shared.unregistered == []
        stage.triton.shared.forget()
        await stage.until(lambda: stage.observed.bytes == (0, 0, 0))


class TestFallback:
    async def test_a_failed_registration_is_logged_once(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        stage.triton.shared.refusal = "Unable to open shared memory region: '/x'"
        for value in (1, 2):
            assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
        assert stage.observed.ways == ["unavailable", "unavailable"]
        assert caplog.text.count("no shared memory for large tensors") == 1

    async def test_a_failed_registration_is_retried(
        self, stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage.triton.shared.refusal = "Unable to open shared memory region: '/x'"
        await stage.infer()
        stage.triton.shared.refusal = ""
        monkeypatch.setattr(stage.shared_memory._backoff, "due_at", 0.0)
        with caplog.at_level("INFO"):
            await stage.infer()
        assert stage.observed.ways == ["unavailable", "shared_memory"]
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
            assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
        assert stage.observed.ways == ["shared_memory", "shared_memory", "lost", "shared_memory"]
        await stage.until(lambda: stage.observed.bytes == (LARGE_BYTES, 0, 0))
