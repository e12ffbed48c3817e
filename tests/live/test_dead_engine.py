"""The engine of an LLM backend dies, and Triton still reports the model as ready; known refusals are 400."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.launcher.launch import EmbeddedOptions
from app.launcher.server import EmbeddedTriton
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from tests.live.repairing import repairing_gateway
from tests.toolkit.processes import GatewayProcess, running_triton, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually

NOTICED_S = 15.0
"""A dead engine is known within this time."""
MODEL = """
name: "llm"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
CONFIG = """
pipelines:
  llm:
    model: llm
    inputs: {prompt: {tensor: text_input, kind: text}}
    outputs: {text: {tensor: text_output, kind: text}}
    stream: true
    engine_errors: [EngineCore encountered an issue, EngineDeadError]
    refusals: [{message_pattern: is longer than the maximum model length, code: context_length_exceeded, field: prompt}]
    sample: {prompt: Hi}
"""


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """A Triton for this module only, because its tests reload the model."""
    repository = tmp_path_factory.mktemp("own") / "repository"
    (repository / "llm" / "1").mkdir(parents=True)
    (repository / "llm" / "config.pbtxt").write_text(MODEL)
    shutil.copy(Path(__file__).parent / "engine_model.py", repository / "llm" / "1" / "model.py")
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


gateway_of = partial(repairing_gateway, config=CONFIG)


def ask(gateway: GatewayProcess, prompt: str = "Hi", path: str = "") -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/pipelines/llm{path}", json={"prompt": prompt}, timeout=PATIENCE_S)


def readiness(gateway: GatewayProcess) -> httpx.Response:
    return httpx.get(f"{gateway.url}/health/ready")


async def reload(url: str) -> None:
    async with open_transport(url) as channel:
        await TritonEngine(channel).reload_model("llm")


def test_with_repair_the_engine_is_loaded_again(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, repair="true") as gateway:
        assert ask(gateway).status_code == 200
        first = ask(gateway, "die", "/stream")
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (503, "model_not_ready", True)
        assert int(first.headers["Retry-After"]) > 0
        eventually(lambda: "model 'llm' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        assert ask(gateway).json() == {"text": "Hi"}
        assert gateway.metric("engine_deaths_total", model="llm") == 1


def test_without_repair_the_pipeline_is_not_ready_until_a_reload(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, repair="false") as gateway:
        began = time.monotonic()
        assert ask(gateway, "die").status_code == 503
        eventually(lambda: readiness(gateway).status_code == 503)
        assert time.monotonic() - began < NOTICED_S
        assert "its engine has died" in readiness(gateway).text
        refused = ask(gateway)
        assert (refused.status_code, refused.json()["detail"]) == (503, "The engine of model 'llm' has died.")
        assert gateway.metric("model_ready", model="llm") == 0
        asyncio.run(reload(own_triton.grpc_url))
        wait_until_ready(gateway, PATIENCE_S)
        assert ask(gateway).status_code == 200


def test_a_known_refusal_is_an_error_of_the_caller(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, repair="false") as gateway:
        for path in ("", "/stream"):
            answer = ask(gateway, "long", path)
            assert (answer.status_code, answer.json()["code"]) == (400, "context_length_exceeded")
            assert answer.json()["errors"][0]["field"] == "prompt"
