"""Files and texts in tensors of 8-bit numbers, missing numbers, and chats without images, with the real Triton."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.image_host import PNG
from tests.toolkit.processes import GatewayProcess, running_gateway

LARGE = PNG + bytes(range(256)) * 8192
CONFIG: dict[str, Any] = {
    "image": {
        "model": "file_numbers",
        "inputs": {"file": {"tensor": "ENCODED", "kind": "image"}},
        "outputs": {"size": {"tensor": "SIZE"}, "file": {"tensor": "ENCODED_OUT", "kind": "image"}},
        "sample": {"file": "a.png"},
        "stream": True,
    },
    "file_numbers": {"model": "file_numbers"},
    "table": {
        "model": "typed_echo",
        "inputs": {"x": {"tensor": "FP32", "missing": "nan"}},
        "outputs": {"x": {"tensor": "FP32_OUT"}},
        "early_exit": [{"reason": "none", "missing": ["FP64_OUT"]}],
    },
}


@pytest.fixture(scope="module", params=["grpc", "shared_memory"])
def gateway(
    request: pytest.FixtureRequest, triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp(f"files_{request.param}")
    (folder / "a.png").write_bytes(PNG)
    (folder / "gateway.yaml").write_text(json.dumps({"pipelines": CONFIG}))
    memory = str(64 * 1024 * 1024 * (request.param == "shared_memory"))
    settings = {"config": str(folder / "gateway.yaml"), "shared_memory_bytes": memory}
    with running_gateway(folder, triton_url=triton.grpc_url, **settings) as process:
        yield process


@pytest.fixture(scope="module")
def without_file(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway without a gateway.yaml."""
    with running_gateway(tmp_path_factory.mktemp("derived"), triton_url=triton.grpc_url) as process:
        yield process


def post(gateway: GatewayProcess, name: str, status: int = 200, **request: Any) -> Any:
    answer = httpx.post(f"{gateway.url}/v1/pipelines/{name}", timeout=30, **request)
    assert answer.status_code == status, answer.text
    return answer.json()


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def forms_of(content: bytes, media_type: str) -> dict[str, dict[str, Any]]:
    """The same request in every form."""
    return {
        "json": {"json": {"file": base64_of(content)}},
        "data_url": {"json": {"file": f"data:{media_type};base64,{base64_of(content)}"}},
        "form": {"files": {"file": ("a", content, media_type)}},
        "part_without_name": {"files": {"file": (None, content)}},
        "raw": {"content": content, "headers": {"Content-Type": media_type}},
        "octets": {"content": content, "headers": {"Content-Type": "application/octet-stream"}},
    }


class TestDeclaredKinds:
    @pytest.mark.parametrize("content", [PNG, LARGE], ids=["small", "large"])
    def test_an_image_is_the_bytes_of_the_tensor(self, gateway: GatewayProcess, content: bytes) -> None:
        for form, request in forms_of(content, "image/png").items():
            assert post(gateway, "image", **request) == {"size": len(content), "file": base64_of(content)}, form

    def test_a_stream_has_the_file(self, gateway: GatewayProcess) -> None:
        url = f"{gateway.url}/v1/pipelines/image/stream"
        answer = httpx.post(url, content=LARGE, headers={"Content-Type": "image/png"}, timeout=30)
        assert f'{{"size":{len(LARGE)},"file":"{base64_of(LARGE)}"}}' in answer.text
        if "shared_memory" in gateway.log_path.parent.name:
            assert gateway.metric("large_calls_total", way="shared_memory") > 0


class TestNumbersThatTakeAFile:
    """The kind of a pipeline without a gateway.yaml, or without `kind`, is `number`."""

    def answered(self, gateway: GatewayProcess, **request: Any) -> bytes:
        return bytes(post(gateway, "file_numbers", **request)["ENCODED_OUT"])

    def test_a_file_part_and_a_raw_body_are_their_bytes(
        self, gateway: GatewayProcess, without_file: GatewayProcess
    ) -> None:
        for each in (gateway, without_file):
            for content in (b"[1, 2]", PNG, LARGE):
                assert self.answered(each, files={"ENCODED": ("a.png", content, "image/png")}) == content
                for media_type in ("image/png", "audio/wav", "application/octet-stream"):
                    assert self.answered(each, content=content, headers={"Content-Type": media_type}) == content

    def test_lists_of_numbers_stay_numbers(self, without_file: GatewayProcess) -> None:
        assert self.answered(without_file, json={"ENCODED": list(PNG)}) == PNG
        assert self.answered(without_file, json={"ENCODED": list(LARGE)}) == LARGE
        assert self.answered(without_file, files={"ENCODED": (None, "[1, 2]")}) == bytes([1, 2])
        post(without_file, "file_numbers", 422, files={"ENCODED": (None, "[1, 256]")})
        problem = post(without_file, "file_numbers", 422, files={"ENCODED": (None, PNG)})
        assert problem["detail"] == "'ENCODED' is not JSON."
        post(without_file, "file_numbers", 422, json={"ENCODED": base64_of(PNG)})


def test_missing_numbers_reach_the_model(gateway: GatewayProcess) -> None:
    assert post(gateway, "table", json={"x": [[1, None], [None, 0.5]]})["x"] == [[1, None], [None, 0.5]]
    large = [[None if (row + column) % 3 else 0.5 for column in range(100)] for row in range(300)]
    assert post(gateway, "table", json={"x": large})["x"] == large
