"""Large tensors in shared memory with the real Triton, and files in tensors of 8-bit numbers."""

import base64
import signal
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from app.launcher.embedded_triton import EmbeddedTriton
from app.shared_memory.regions import PREFIX, SHARED_MEMORY
from tests.toolkit.http_server import PNG
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway, live_gateway
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


LARGE = PNG + bytes(range(256)) * 8192
CONFIG: dict[str, Any] = {
    "image": {
        "model": "file_numbers",
        "inputs": {"file": {"tensor": "ENCODED", "kind": "image"}},
        "outputs": {"size": {"tensor": "SIZE"}, "file": {"tensor": "ENCODED_OUT", "kind": "image"}},
        "stream": True,
    },
    "file_numbers": {"model": "file_numbers"},
}


of_files = live_gateway(CONFIG, shared_memory_bytes=str(64 * MIB))


def answered(of_files: GatewayProcess, name: str, status: int = 200, **request: Any) -> Any:
    answer = httpx.post(f"{of_files.url}/v1/pipelines/{name}", timeout=30, **request)
    assert answer.status_code == status, answer.text
    return answer.json()


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_an_image_is_the_bytes_of_the_tensor_in_every_form(of_files: GatewayProcess) -> None:
    for content in (PNG, LARGE):
        forms: dict[str, dict[str, Any]] = {
            "json": {"json": {"file": base64_of(content)}},
            "data_url": {"json": {"file": f"data:image/png;base64,{base64_of(content)}"}},
            "form": {"files": {"file": ("a", content, "image/png")}},
            "part_without_name": {"files": {"file": (None, content)}},
            "raw": {"content": content, "headers": {"Content-Type": "image/png"}},
            "octets": {"content": content, "headers": {"Content-Type": "application/octet-stream"}},
        }
        for form, request in forms.items():
            assert answered(of_files, "image", **request) == {"size": len(content), "file": base64_of(content)}, form
        streamed = httpx.post(f"{of_files.url}/v1/pipelines/image/stream", timeout=30, **forms["raw"])
        assert f'{{"size":{len(content)},"file":"{base64_of(content)}"}}' in streamed.text
    assert of_files.metric("large_calls_total", way="shared_memory") > 0


def test_a_file_and_a_list_of_numbers_are_the_same_tensor(of_files: GatewayProcess) -> None:
    """Without `kind` in gateway.yaml, the kind of the pipeline is `number`."""

    def echoed(**request: Any) -> bytes:
        return bytes(answered(of_files, "file_numbers", **request)["ENCODED_OUT"])

    for content in (b"[1, 2]", PNG, LARGE):
        assert echoed(files={"ENCODED": ("a.png", content, "image/png")}) == content
        for media_type in ("image/png", "audio/wav", "application/octet-stream"):
            assert echoed(content=content, headers={"Content-Type": media_type}) == content
        assert echoed(json={"ENCODED": list(content)}) == content
    assert echoed(files={"ENCODED": (None, "[1, 2]")}) == bytes([1, 2])
    answered(of_files, "file_numbers", 422, files={"ENCODED": (None, "[1, 256]")})
    problem = answered(of_files, "file_numbers", 422, files={"ENCODED": (None, PNG)})
    assert problem["detail"] == "'ENCODED' is not JSON."
    answered(of_files, "file_numbers", 422, json={"ENCODED": base64_of(PNG)})
