"""Large tensors in shared memory with the real Triton."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from app.core.errors import ContractViolation, DeadlineExceeded
from app.core.inference import BYTES, Deadline, InferenceRequest, Tensor, bytes_array
from app.launcher.embedded_triton import EmbeddedTriton
from app.shared_memory.leases import Lease, SharedMemory
from app.shared_memory.regions import PREFIX, SHARED_MEMORY
from app.triton.connect import MAX_MESSAGE_BYTES, open_transport, registry_of
from app.triton.triton_engine import TritonEngine
from tests.toolkit.processes import GatewayProcess, StartGateway
from tests.toolkit.waiting import PATIENCE_S, eventually

MIB = 1024 * 1024
CONFIG = """
pipelines:
  scripted_large:
    model: scripted_large
    inputs: {file: {tensor: FILE, kind: binary}}
    outputs: {sum: {tensor: SUM}, fill: {tensor: FILL}}
"""


def post(gateway: GatewayProcess, file: bytes, timeout_s: float = 20.0, **parameters: int) -> httpx.Response:
    return httpx.post(
        f"{gateway.url}/v1/pipelines/scripted_large",
        content=file,
        params=parameters,
        headers={"Content-Type": "application/octet-stream", "X-Request-Timeout": str(timeout_s)},
        timeout=30,
    )


def files(region: str) -> set[str]:
    """The files of the gateway that owns the region: other gateways of this machine have files too."""
    owner = region.removeprefix(PREFIX).rpartition("_")[0]
    return {path.name for path in SHARED_MEMORY.glob(f"{PREFIX}{owner}*")}


def registered(triton: EmbeddedTriton) -> set[str]:
    with InferenceServerClient(triton.grpc_url) as client:
        return {name for name in client.get_system_shared_memory_status().regions if name.startswith(PREFIX)}


@pytest.fixture
def start(start_gateway: StartGateway, tmp_path: Path) -> Callable[[], GatewayProcess]:
    """Returns a function that starts a gateway with 64 MiB of shared memory."""
    config = tmp_path / "gateway.yaml"
    config.write_text(CONFIG)
    return lambda: start_gateway(config=str(config), shared_memory_bytes=str(64 * MIB))


def test_an_answer_is_the_same_with_and_without_shared_memory(
    start: Callable[[], GatewayProcess], gateway: GatewayProcess
) -> None:
    sharing = start()
    for size in (MIB, 4 * MIB):
        file = np.random.default_rng(size).bytes(size)
        answer = post(sharing, file).json()
        assert answer == post(gateway, file).json()
        assert answer["fill"] == [float(file[0])] * 131072
    assert sharing.metric("large_calls_total", way="shared_memory") == 2
    assert gateway.metric("large_calls_total") == 0


def test_killed_and_stopped_gateways_leave_no_regions(
    start: Callable[[], GatewayProcess], triton: EmbeddedTriton
) -> None:
    killed = start()
    assert post(killed, b"a" * MIB).status_code == 200
    (orphan,) = registered(triton)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(20)
    assert len(files(orphan)) == 1, "a registered region still has a file"
    gateway = start()
    assert post(gateway, b"a" * MIB).status_code == 200
    eventually(lambda: orphan not in registered(triton))
    (own,) = registered(triton)
    assert files(own) != set()
    gateway.process.terminate()
    gateway.process.wait(PATIENCE_S)
    assert (files(orphan), files(own), registered(triton)) == (set(), set(), set())


async def test_the_region_of_an_abandoned_call_is_not_reused(triton: EmbeddedTriton) -> None:
    """The model continues after its call was abandoned."""
    async with opened(triton) as (engine, transport):
        await check_abandoned(engine, transport)


async def check_abandoned(engine: TritonEngine, transport: SharedMemory) -> None:
    leases = await leased_by(transport)
    with pytest.raises(DeadlineExceeded):
        await engine.infer(request(b"A", sleep_ms=1200), Deadline.after(0.2))
    abandoned = leases[0].regions[0]
    output = leases[0].outputs[1][1]
    assert output is not None
    written = memoryview(abandoned.view)[output.offset : output.offset + output.size].cast("f")
    assert written[0] == 0.0
    while 0.0 in written.tolist():
        answer = await engine.infer(request(b"B"), Deadline.after(20))
        assert answer.outputs["FILL"].array[0] == ord("B")
    assert set(written.tolist()) == {float(ord("A"))}
    assert len(leases) > 2
    assert all(abandoned not in lease.regions for lease in leases[1:])
    async with asyncio.timeout(PATIENCE_S):
        while transport._pool.those("retired"):
            await asyncio.sleep(0.02)


async def test_an_output_that_is_too_large_is_a_contract_violation(triton: EmbeddedTriton) -> None:
    async with opened(triton) as (engine, _):
        with pytest.raises(ContractViolation, match="'FILL' is larger than declared"):
            await engine.infer(request(b"A", count=200_000), Deadline.after(20))


@asynccontextmanager
async def opened(triton: EmbeddedTriton) -> AsyncIterator[tuple[TritonEngine, SharedMemory]]:
    async with open_transport(triton.grpc_url) as transport:
        shared_memory = SharedMemory(registry_of(transport), 64 * MIB, MAX_MESSAGE_BYTES)
        engine = TritonEngine(transport, shared_memory=shared_memory)
        await engine.model_config("scripted_large")
        running = asyncio.create_task(shared_memory.run())
        yield engine, shared_memory
        running.cancel()
        await shared_memory.close()


def request(byte: bytes, **parameters: int) -> InferenceRequest:
    file = Tensor("FILE", BYTES, bytes_array([byte * MIB], (1,)))
    return InferenceRequest("scripted_large", (file,), parameters=parameters)


async def leased_by(shared_memory: SharedMemory) -> list[Lease]:
    """Returns a list that all later leases are added to."""
    leases: list[Lease] = []
    lease_of = shared_memory.lease

    async def recorded_lease(request: InferenceRequest) -> Lease | None:
        lease = await lease_of(request)
        if lease is not None:
            leases.append(lease)
        return lease

    shared_memory.lease = recorded_lease  # type: ignore[method-assign]
    return leases
