"""Images in chats with OpenAI's client, over stand-ins of vLLM and TensorRT-LLM's LLM API in a real Triton."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from app.cli import main
from app.launcher.server import EmbeddedTriton
from tests.llm.test_contents import LLAVA
from tests.toolkit.image_host import GIF, PNG
from tests.toolkit.llm_backends import TEMPLATE, running_backends
from tests.toolkit.processes import running_gateway

BACKENDS = ("vllm", "tensorrt_llm_api")
TOOLS: Any = [{"type": "function", "function": {"name": "look"}}]


def image(content: bytes, media_type: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{base64.b64encode(content).decode()}"}}


COMPARE: Any = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Compare "},
            image(PNG, "image/png"),
            {"type": "text", "text": " and "},
            image(GIF, "image/gif"),
        ],
    },
]
SEEN = f"2: {PNG.hex()} {GIF.hex()}"
"""What the stand-ins say: the number of markers in the prompt, and the bytes of each image."""


def config() -> dict[str, Any]:
    """For each backend, a pipeline whose template takes parts, and one whose template takes texts."""
    chats = {"parts": {"template_text": LLAVA}, "texts": {"template_text": TEMPLATE, "image_marker": "<image>"}}
    pipelines: dict[str, Any] = {
        f"{name}-{form}": {"model": name, "preset": name, "openai": {"chat": chat, "tools": "hermes"}}
        for name in BACKENDS
        for form, chat in chats.items()
    }
    pipelines["no-images"] = {"model": "vllm", "preset": "vllm", "openai": {"chat": {"template_text": TEMPLATE}}}
    return {"pipelines": pipelines}


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with running_backends(tmp_path_factory.mktemp("backends"), models_venv) as triton:
        yield triton


@pytest.fixture(scope="module")
def client(backends: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "gateway.yaml").write_text(json.dumps(config()))
    settings = {"triton_url": backends.grpc_url, "config": str(folder / "gateway.yaml"), "image_hosts": "localhost"}
    with (
        running_gateway(folder, **settings) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


@pytest.mark.parametrize("form", ["parts", "texts"])
@pytest.mark.parametrize("backend", BACKENDS)
class TestEachBackend:
    def test_the_model_sees_the_images_in_their_order(self, client: OpenAI, backend: str, form: str) -> None:
        answer = client.chat.completions.create(model=f"{backend}-{form}", messages=COMPARE)
        assert answer.choices[0].message.content == SEEN

    def test_a_stream_is_the_same_text(self, client: OpenAI, backend: str, form: str) -> None:
        stream = client.chat.completions.create(model=f"{backend}-{form}", messages=COMPARE, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == SEEN

    def test_images_beside_messages_of_tools(self, client: OpenAI, backend: str, form: str) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages: Any = [
            {"role": "user", "content": "What is there?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a picture"},
            {"role": "user", "content": [image(PNG, "image/png")]},
        ]
        answer = client.chat.completions.create(model=f"{backend}-{form}", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == f"1: {PNG.hex()}"


def test_a_model_of_texts_names_the_part(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="no-images", messages=COMPARE)
    assert caught.value.param == "messages[1].content[1]"


def test_a_listed_host_of_this_machine_is_not_asked(client: OpenAI) -> None:
    """No setting allows addresses that are not public."""
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://localhost/a"}}]}]
    with pytest.raises(openai.BadRequestError, match="no public IP address"):
        client.chat.completions.create(model="vllm-texts", messages=messages)


def test_a_template_without_a_place_is_found_by_check(
    backends: EmbeddedTriton, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chat = {"template_text": TEMPLATE, "images": "images"}
    pipelines = {"llm": {"model": "vllm", "preset": "vllm", "openai": {"chat": chat}}}
    (tmp_path / "gateway.yaml").write_text(json.dumps({"pipelines": pipelines}))
    assert main(["check", "--triton", backends.grpc_url, "--config", str(tmp_path / "gateway.yaml")]) == 1
    problem = "pipelines.llm.openai.chat.image_marker is required: the chat template has no place for the images"
    assert problem in capsys.readouterr().out
