"""Bodies with images over a stand-in of vLLM: the pipeline's own limit under every address, the others unchanged."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.launch import EmbeddedOptions
from tests.live.test_bad_input import exchange
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton
from tests.zoo.kinds import BY_NAME
from tests.zoo.repository import write_models

MIB = 1024 * 1024
OWN_BYTES = 3 * MIB
IMAGE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(2 * MIB)).decode()
CONFIG = f"""
pipelines:
  images: {{model: images, preset: vllm}}
  three_mib: {{model: images, preset: vllm, limits: {{body_bytes: {OWN_BYTES}}}}}
  text: {{model: vllm, preset: vllm}}
"""
ADDRESSES = ("/v1/pipelines/{}", "/v1/pipelines/{}/stream", "/v1/streams", "/v1/completions")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("images")
    vllm = BY_NAME["vllm"]
    images = replace(vllm, name="images", inputs={**vllm.inputs, "image": "BYTES[0..3]?"})
    text = replace(vllm, inputs={name: form for name, form in vllm.inputs.items() if name != "image"})
    write_models(folder / "models", [text, images])
    (folder / "gateway.yaml").write_text(CONFIG)
    settings = {"config": str(folder / "gateway.yaml"), "max_body_bytes": str(MIB)}
    with (
        running_triton(EmbeddedOptions(folder / "models", models_venv)) as triton,
        running_gateway(folder / "gateway", triton_url=triton.grpc_url, **settings) as process,
    ):
        yield process


def send(gateway: GatewayProcess, address: str, pipeline: str, images: list[str], *, chunked: bool) -> httpx.Response:
    fields: dict[str, Any] = {"prompt": "Hi", "images": images}
    if address == "/v1/streams":
        fields = {"pipeline": pipeline, "inputs": fields}
    elif address == "/v1/completions":
        fields |= {"model": pipeline, "stream": True}
    body = json.dumps(fields).encode()
    parts = (body[start : start + 64 * 1024] for start in range(0, len(body), 64 * 1024))
    headers = {"Content-Type": "application/json"}
    url = gateway.url + address.format(pipeline)
    return httpx.post(url, content=parts if chunked else body, headers=headers, timeout=60)


def text_of(answer: httpx.Response) -> str:
    """The detail and the hint of an error, in the form of its dialect."""
    found = answer.json()
    return str(found["error"]["message"]) if "error" in found else f"{found['detail']} {found['hint']}"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("address", ADDRESSES)
class TestEachAddress:
    def test_images_above_the_gateways_limit_are_accepted(
        self, gateway: GatewayProcess, address: str, chunked: bool
    ) -> None:
        answer = send(gateway, address, "images", [IMAGE, IMAGE, IMAGE], chunked=chunked)
        assert answer.status_code in (200, 201), answer.text
        assert '"error"' not in answer.text

    def test_a_pipeline_has_its_own_limit(self, gateway: GatewayProcess, address: str, chunked: bool) -> None:
        assert send(gateway, address, "three_mib", [IMAGE], chunked=chunked).status_code in (200, 201)
        answer = send(gateway, address, "three_mib", [IMAGE, IMAGE], chunked=chunked)
        assert answer.status_code == 413
        limit = f"more than the limit of {OWN_BYTES} bytes. An operator can raise `limits.body_bytes` of the pipeline."
        assert text_of(answer).endswith(limit)
        size = len(json.dumps([IMAGE, IMAGE]))
        assert chunked or int(text_of(answer).split()[3]) > size

    def test_a_model_without_images_keeps_the_gateways_limit(
        self, gateway: GatewayProcess, address: str, chunked: bool
    ) -> None:
        answer = send(gateway, address, "text", [IMAGE], chunked=chunked)
        assert answer.status_code == 413
        limit = f"more than the limit of {MIB} bytes. An operator can raise GATEWAY_MAX_BODY_BYTES."
        assert text_of(answer).endswith(limit)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_larger_body_is_refused_before_it_is_sent(gateway: GatewayProcess, address: str) -> None:
    head = f"POST {address.format('images')} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = exchange(gateway, f"{head}Content-Length: {64 * MIB + 1}\r\n\r\n".encode())
    assert b" 413 " in answer
    assert b"more than the limit of 67108864 bytes" in answer


def test_the_description_of_a_pipeline_has_its_limit(gateway: GatewayProcess) -> None:
    limits = {
        name: httpx.get(f"{gateway.url}/v1/pipelines/{name}").json()["limits"]["body_bytes"]
        for name in ("images", "three_mib", "text")
    }
    assert limits == {"images": 64 * MIB, "three_mib": OWN_BYTES, "text": MIB}
