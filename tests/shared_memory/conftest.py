"""An engine with shared memory, a fake Triton that maps the regions, and the behaviour of its models."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import DeadlineExceeded
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, KeptMemory, Tensor
from app.core.model import ModelConfig, TensorSpec
from app.shared_memory import regions
from app.shared_memory.leases import SharedMemory
from app.shared_memory.regions import LARGE_BYTES, SHARED_MEMORY
from app.triton.connect import MAX_MESSAGE_BYTES, open_transport, registry_of
from app.triton.triton_engine import TritonEngine
from tests.toolkit.triton import FakeTriton, serving

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
    """An engine with shared memory of 4 MiB in front of a fake Triton."""

    def __init__(
        self, triton: FakeTriton, shared_memory: SharedMemory, engine: TritonEngine, observed: Observed
    ) -> None:
        self.triton, self.shared_memory, self.engine, self.observed = triton, shared_memory, engine, observed

    async def infer(
        self, *tensors: Tensor, model: str = "m", seconds: float = LONG_S, kept: KeptMemory | None = None
    ) -> InferenceResponse:
        request = InferenceRequest(model, tensors or (numbers(7),))
        return await self.engine.infer(request if kept is None else request.extended(kept), Deadline.after(seconds))

    async def sum_of(self, tensor: Tensor) -> float:
        """Returns the only element of the answer of a model that adds up its input."""
        (total,) = (await self.infer(tensor)).outputs["Y"].array.tolist()
        return float(total)

    async def abandon(self, *tensors: Tensor) -> None:
        """Makes a call that passes its deadline, and whose region Triton goes on to use."""
        answering, self.triton.unary = self.triton.unary, never
        with pytest.raises(DeadlineExceeded):
            await self.infer(*tensors, seconds=0.05)
        self.triton.shared.in_use.update(self.triton.shared.regions)
        self.triton.unary = answering

    @property
    def regions(self) -> list[str]:
        """The region of the first input of each call."""
        return [region_of(request.inputs[0]) for request in self.triton.requests]


def region_of(tensor: pb.ModelInferRequest.InferInputTensor) -> str:
    return tensor.parameters["shared_memory_region"].string_param


def numbers(value: float, count: int = LARGE, name: str = "X") -> Tensor:
    return Tensor(name, "FP32", np.full(count, value, np.float32))


def sum_of(triton: FakeTriton):  # type: ignore[no-untyped-def]
    """Returns a model whose outputs are filled with the sum of its input."""

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


def seen_by(triton: FakeTriton) -> list[bytes]:
    """Returns a list that receives the shared bytes of the first input of each call."""
    seen: list[bytes] = []

    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        seen.append(bytes(triton.shared.bytes_of(request.inputs[0])))
        return pb.ModelInferResponse()

    triton.unary = unary
    return seen


async def never(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
    await asyncio.sleep(LONG_S)
    return pb.ModelInferResponse()


def failing(code: grpc.StatusCode):  # type: ignore[no-untyped-def]
    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await context.abort(code, "no")
        raise AssertionError

    return unary


def not_found_or(triton: FakeTriton):  # type: ignore[no-untyped-def]
    """Returns a model that fails like Triton for an unregistered region."""
    answer = sum_of(triton)

    async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        parameters = request.inputs[0].parameters
        named = parameters["shared_memory_region"].string_param if "shared_memory_region" in parameters else None
        if named is not None and named not in triton.shared.regions:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unable to find shared memory region: '{named}'")
        return await answer(request, context)

    return unary


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Returns the files of this test only, because other gateways on the machine use the same folder."""
    prefix = f"lane_test_{secrets.token_hex(8)}_"
    monkeypatch.setattr(regions, "PREFIX", prefix)
    return lambda: list(SHARED_MEMORY.glob(f"{prefix}*"))


@pytest.fixture
async def stage(own_files: Callable[[], list[Path]]) -> AsyncIterator[Stage]:
    observed = Observed()
    async with serving(FakeTriton()) as triton, open_transport(triton.url) as transport:
        triton.unary = sum_of(triton)
        shared_memory = SharedMemory(
            registry_of(transport), 4 * MIB, MAX_MESSAGE_BYTES, observed.called, observed.holds
        )
        for config in (CONFIG, FIXED):
            shared_memory.learn(config, "")
        running = asyncio.create_task(shared_memory.run())
        yield Stage(triton, shared_memory, TritonEngine(transport, shared_memory=shared_memory), observed)
        running.cancel()
        await shared_memory.close()
    assert own_files() == []
