"""Files in tensors of 8-bit numbers, with the real Triton. Large ones travel in shared memory."""

import base64
from typing import Any

import httpx

from tests.toolkit.image_host import PNG
from tests.toolkit.processes import GatewayProcess, live_gateway

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


gateway = live_gateway(CONFIG, shared_memory_bytes=str(64 * 1024 * 1024))


def post(gateway: GatewayProcess, name: str, status: int = 200, **request: Any) -> Any:
    answer = httpx.post(f"{gateway.url}/v1/pipelines/{name}", timeout=30, **request)
    assert answer.status_code == status, answer.text
    return answer.json()


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_an_image_is_the_bytes_of_the_tensor_in_every_form(gateway: GatewayProcess) -> None:
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
            assert post(gateway, "image", **request) == {"size": len(content), "file": base64_of(content)}, form
        streamed = httpx.post(f"{gateway.url}/v1/pipelines/image/stream", timeout=30, **forms["raw"])
        assert f'{{"size":{len(content)},"file":"{base64_of(content)}"}}' in streamed.text
    assert gateway.metric("large_calls_total", way="shared_memory") > 0


def test_a_file_and_a_list_of_numbers_are_the_same_tensor(gateway: GatewayProcess) -> None:
    """Without `kind` in gateway.yaml, the kind of the pipeline is `number`."""

    def answered(**request: Any) -> bytes:
        return bytes(post(gateway, "file_numbers", **request)["ENCODED_OUT"])

    for content in (b"[1, 2]", PNG, LARGE):
        assert answered(files={"ENCODED": ("a.png", content, "image/png")}) == content
        for media_type in ("image/png", "audio/wav", "application/octet-stream"):
            assert answered(content=content, headers={"Content-Type": media_type}) == content
        assert answered(json={"ENCODED": list(content)}) == content
    assert answered(files={"ENCODED": (None, "[1, 2]")}) == bytes([1, 2])
    post(gateway, "file_numbers", 422, files={"ENCODED": (None, "[1, 256]")})
    problem = post(gateway, "file_numbers", 422, files={"ENCODED": (None, PNG)})
    assert problem["detail"] == "'ENCODED' is not JSON."
    post(gateway, "file_numbers", 422, json={"ENCODED": base64_of(PNG)})
