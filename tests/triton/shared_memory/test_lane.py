"""The lane over a real wire: a gRPC server that maps the regions as Triton does."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.domain.deadline import Deadline
from app.domain.errors import DeadlineExceeded, GatewayError, ModelError
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, TensorSpec
from app.domain.tensor import BYTES, Tensor, bytes_array
from app.triton.engine import TritonEngine
from app.triton.shared_memory import owner
from app.triton.shared_memory.lane import Lane
from app.triton.shared_memory.layout import LARGE_BYTES
from app.triton.shared_memory.region import SHARED_MEMORY
from app.triton.transports import open_transport
from tests.fakes.triton import FakeTriton, serving

LARGE = LARGE_BYTES // 4
MIB = 1024 * 1024
CONFIG = ModelConfig("m", "python", 0, (TensorSpec("X", "FP32", (-1,)),), (TensorSpec("Y", "FP32", (-1,)),))
FIXED = ModelConfig(
    "fixed", "python", 0, CONFIG.inputs, (TensorSpec("Y", "FP32", (LARGE,)), TensorSpec("Z", "FP32", (1,)))
)
LONG_S = 20.0


class Observed:
    def __init__(self) -> None:
        self.ways: list[str] = []
        self.bytes = (0, 0, 0)

    def called(self, way: str) -> None:
        self.ways.append(way)

    def holds(self, *, free: int, used: int, quarantined: int) -> None:
        self.bytes = (free, used, quarantined)


class Stage:
    """An engine with a lane of 4 MiB before a fake Triton."""

    def __init__(self, triton: FakeTriton, lane: Lane, engine: TritonEngine, observed: Observed) -> None:
        self.triton, self.lane, self.engine, self.observed = triton, lane, engine, observed

    async def infer(self, *tensors: Tensor, model: str = "m", seconds: float = LONG_S) -> InferenceResponse:
        return await self.engine.infer(InferenceRequest(model, tensors or (numbers(7),)), Deadline.after(seconds))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not is_so():
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def own_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """The files of this test alone: other gateways of the machine have theirs in the same folder."""
    prefix = f"lane_test_{secrets.token_hex(8)}_"
    monkeypatch.setattr(owner, "PREFIX", prefix)
    return lambda: list(SHARED_MEMORY.glob(f"{prefix}*"))


@pytest.fixture
async def stage(own_files: Callable[[], list[Path]]) -> AsyncIterator[Stage]:
    observed = Observed()
    async with serving(FakeTriton()) as triton, open_transport(triton.url) as transport:
        triton.unary = sum_of(triton)
        lane = Lane(transport, 4 * MIB, observed)
        for config in (CONFIG, FIXED):
            lane.learn(config, "")
        running = asyncio.create_task(lane.run())
        yield Stage(triton, lane, TritonEngine(transport, lane=lane), observed)
        running.cancel()
        await lane.close()
    assert own_files() == []


def numbers(value: float, count: int = LARGE, name: str = "X") -> Tensor:
    return Tensor(name, "FP32", np.full(count, value, np.float32))


def sum_of(triton: FakeTriton):  # type: ignore[no-untyped-def]
    """A model whose output Y is the sum of its input, as often as the client asked for."""

    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        tensor = request.inputs[0]
        raw = triton.shared.bytes_of(tensor) if "shared_memory_region" in tensor.parameters else None
        total = np.frombuffer(request.raw_input_contents[0] if raw is None else raw, np.float32).sum(dtype=np.float32)
        answer = pb.ModelInferResponse()
        for output in request.outputs or [pb.ModelInferRequest.InferRequestedOutputTensor(name="Y")]:
            _write(answer, output, triton, total)
        return answer

    return unary


def _write(
    answer: pb.ModelInferResponse,
    output: pb.ModelInferRequest.InferRequestedOutputTensor,
    triton: FakeTriton,
    value: float,
) -> None:
    is_shared = "shared_memory_region" in output.parameters
    array = np.full(LARGE if is_shared else 1, value, np.float32)
    answer.outputs.add(name=output.name, datatype="FP32", shape=array.shape)
    if is_shared:
        triton.shared.bytes_of(output)[:] = array.tobytes()
    answer.raw_output_contents.append(b"" if is_shared else array.tobytes())


async def test_a_large_input_travels_through_shared_memory(stage: Stage) -> None:
    response = await stage.infer(numbers(1))
    assert response.outputs["Y"].array.tolist() == [LARGE]
    (request,) = stage.triton.requests
    assert list(request.raw_input_contents) == []
    assert stage.observed.ways == ["shared_memory"]


async def test_a_small_input_beside_it_travels_over_the_wire(stage: Stage) -> None:
    await stage.infer(numbers(1), numbers(3, 1, "NOTE"))
    (request,) = stage.triton.requests
    assert [len(raw) for raw in request.raw_input_contents] == [4]
    assert not request.inputs[1].parameters


async def test_a_small_request_is_not_touched(stage: Stage) -> None:
    await stage.infer(numbers(1, 4))
    assert stage.observed.ways == []
    assert stage.triton.shared.registered == 0


def seen_by(triton: FakeTriton) -> list[bytes]:
    """The shared bytes of the first input of each call from now on."""
    seen: list[bytes] = []

    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        seen.append(bytes(triton.shared.bytes_of(request.inputs[0])))
        return pb.ModelInferResponse()

    triton.unary = unary
    return seen


async def test_bytes_are_written_with_their_lengths(stage: Stage) -> None:
    seen = seen_by(stage.triton)
    elements = [b"a" * LARGE_BYTES, b"", b"\0b"]
    await stage.infer(Tensor("X", BYTES, bytes_array(elements, (3,))))
    assert seen == [b"".join(len(each).to_bytes(4, "little") + each for each in elements)]


async def test_an_array_of_any_order_is_written_in_the_order_it_reads(stage: Stage) -> None:
    seen = seen_by(stage.triton)
    array = np.arange(2 * LARGE, dtype=np.float32).reshape(2, LARGE).T
    await stage.infer(Tensor("X", "FP32", array))
    assert seen == [array.tobytes()]


async def test_an_output_of_fixed_size_comes_through_shared_memory(stage: Stage) -> None:
    outputs = (await stage.infer(numbers(2), model="fixed")).outputs
    assert set(outputs) == {"Y", "Z"}
    assert outputs["Y"].array.tolist() == [2 * LARGE] * LARGE
    assert outputs["Z"].array.tolist() == [2 * LARGE]


async def test_an_output_outlives_the_next_call(stage: Stage) -> None:
    first = await stage.infer(numbers(1), model="fixed")
    await stage.infer(numbers(2), model="fixed")
    assert first.outputs["Y"].array[0] == LARGE
    assert stage.triton.shared.registered == 1


async def test_calls_one_after_the_other_share_a_region(stage: Stage) -> None:
    for value in (1, 2, 3):
        assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
    assert stage.triton.shared.registered == 1
    assert stage.observed.bytes == (LARGE_BYTES, 0, 0)


async def test_calls_at_the_same_time_have_regions_of_their_own(stage: Stage) -> None:
    responses = await asyncio.gather(*(stage.infer(numbers(value)) for value in range(8)))
    assert [response.outputs["Y"].array[0] for response in responses] == [value * LARGE for value in range(8)]
    names = [request.inputs[0].parameters["shared_memory_region"].string_param for request in stage.triton.requests]
    assert len(set(names)) == len(names)


async def test_no_file_stays_while_a_region_is_used(stage: Stage, own_files: Callable[[], list[Path]]) -> None:
    await stage.infer()
    assert [path.suffix for path in own_files()] == [".lock"]


class TestLimit:
    async def test_what_does_not_fit_travels_over_the_wire(self, stage: Stage) -> None:
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
    async def test_a_region_is_not_used_again_while_triton_may_use_it(self, stage: Stage) -> None:
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

    async def test_a_cancelled_call_leaves_its_region_in_quarantine(self, stage: Stage) -> None:
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
    async def test_an_error_that_grpc_may_have_made_does_not(self, stage: Stage, code: grpc.StatusCode) -> None:
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

    async def test_an_old_triton_is_never_asked_to_unregister(self, stage: Stage) -> None:
        """Before 2.50 it would unmap a region that a model still uses, and crash."""
        stage.triton.shared.version = "2.49.0"
        stage.triton.unary = never
        with pytest.raises(DeadlineExceeded):
            await stage.infer(seconds=0.05)
        await asyncio.sleep(0.2)
        assert stage.triton.shared.unregistered == []
        stage.triton.shared.forget()
        await stage.until(lambda: stage.observed.bytes == (0, 0, 0))


class TestFallback:
    async def test_a_refused_registration_is_logged_once(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        stage.triton.shared.refusal = "Unable to open shared memory region: '/x'"
        for value in (1, 2):
            assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
        assert stage.observed.ways == ["unavailable", "unavailable"]
        assert caplog.text.count("no shared memory for large tensors") == 1

    async def test_it_is_tried_again(
        self, stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage.triton.shared.refusal = "Unable to open shared memory region: '/x'"
        await stage.infer()
        stage.triton.shared.refusal = ""
        monkeypatch.setattr(stage.lane._backoff, "due_at", 0.0)
        with caplog.at_level("INFO"):
            await stage.infer()
        assert stage.observed.ways == ["unavailable", "shared_memory"]
        assert "travel through shared memory" in caplog.text

    async def test_no_room_is_a_reason(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        await stage.infer()
        assert stage.observed.ways == ["unavailable"]

    async def test_a_triton_that_was_started_again_costs_no_request(self, stage: Stage) -> None:
        await stage.infer()
        stage.triton.shared.forget()
        stage.triton.unary = not_found_or(stage.triton)
        for value in (2, 3):
            assert (await stage.infer(numbers(value))).outputs["Y"].array.tolist() == [value * LARGE]
        assert stage.observed.ways == ["shared_memory", "shared_memory", "lost", "shared_memory"]
        await stage.until(lambda: stage.observed.bytes == (LARGE_BYTES, 0, 0))


async def never(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
    await asyncio.sleep(LONG_S)
    return pb.ModelInferResponse()


def failing(code: grpc.StatusCode):  # type: ignore[no-untyped-def]
    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await context.abort(code, "no")
        raise AssertionError

    return unary


def not_found_or(triton: FakeTriton):  # type: ignore[no-untyped-def]
    """As Triton fails a request that names a region which is not registered."""
    answer = sum_of(triton)

    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        parameters = request.inputs[0].parameters
        named = parameters["shared_memory_region"].string_param if "shared_memory_region" in parameters else None
        if named is not None and named not in triton.shared.regions:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unable to find shared memory region: '{named}'")
        return await answer(request, context)

    return unary
