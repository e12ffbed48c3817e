"""Large tensors in shared memory with the real Triton."""

import signal
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from app.launcher.embedded_triton import EmbeddedTriton
from app.shared_memory.regions import PREFIX, SHARED_MEMORY
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway
from tests.toolkit.waiting import PATIENCE_S, eventually

MIB = 1024 * 1024


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
def start(start_gateway: StartGateway) -> Callable[[], GatewayProcess]:
    """Returns a function that starts a gateway with 64 MiB of shared memory."""
    return lambda: start_gateway(config=str(LIVE / "gateway.yaml"), shared_memory_bytes=str(64 * MIB))


def test_a_gateway_with_shared_memory_gives_the_same_answers(
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
    too_large = post(sharing, b"A" * MIB, count=200_000)
    assert (too_large.status_code, too_large.json()["code"]) == (502, "contract_violation")
    assert too_large.json()["detail"] == "Output 'FILL' is larger than declared."
    # the model continues after its call was abandoned, so the region of the call is not used again before that
    assert post(sharing, b"A" * MIB, timeout_s=0.2, sleep_ms=1200).status_code == 504
    assert sharing.metric("shared_memory_bytes", state="quarantined") > MIB
    assert set(post(sharing, b"B" * MIB).json()["fill"]) == {float(ord("B"))}
    eventually(lambda: sharing.metric("shared_memory_bytes", state="quarantined") == 0)


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
