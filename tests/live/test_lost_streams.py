"""Streams whose model process died end with a retryable error, on every way of reading, with the real Triton."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.sessions import wait_for_new_triton
from tests.live.test_dead_process import processes_of
from tests.toolkit.events import lines_of
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton, scripted_models
from tests.toolkit.waiting import PATIENCE_S, eventually

CONFIG = """
pipelines:
  stream:
    model: scripted_stream
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text, join: concatenate}, token_id: {tensor: TOKEN_ID, join: list}}
    stream: {progress_s: 60, timeout_s: 120}
    timeout_s: 120
    sample: {script: '{"outputs": 1}'}
    openai:
      completions: {prompt: script, text: text}
      chat: {prompt: script, text: text, template_text: "{{ messages[-1].content }}"}
oip: {models: [scripted_stream]}
"""
SCRIPT = json.dumps({"outputs": 1, "then": "silence"})
SENT_S = 1.0
"""The time in which a model that has sent an output gives back the lock that it shares with Triton."""


@pytest.fixture(scope="module")
def own_triton(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A Triton for this module only, because its tests kill the model processes."""
    repository = scripted_models(tmp_path_factory.mktemp("lost") / "repository")
    with running_triton(EmbeddedOptions(repository, models_venv, first_restart_s=0.2), restarts=True) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(own_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "gateway.yaml").write_text(CONFIG)
    settings = {"config": str(folder / "gateway.yaml"), "triton_repair": "true"}
    with running_gateway(folder / "gateway", triton_url=own_triton.grpc_url, **settings) as process:
        yield process


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipelines": ("/v1/pipelines/stream/stream", {"script": SCRIPT}),
    "chat": (
        "/v1/chat/completions",
        {"model": "stream", "messages": [{"role": "user", "content": SCRIPT}], "stream": True},
    ),
    "completions": ("/v1/completions", {"model": "stream", "prompt": SCRIPT, "stream": True}),
    "generate_stream": ("/v2/models/scripted_stream/generate_stream", {"SCRIPT": SCRIPT}),
}


def kill_the_process_of(triton: EmbeddedTriton) -> None:
    """Kills it after its outputs: Triton 2.51 aborts if a process dies while it holds a lock that both share."""
    (process,) = processes_of(triton.pid, "scripted_stream")
    time.sleep(SENT_S)
    os.kill(process, signal.SIGKILL)


def works_again(gateway: GatewayProcess) -> bool:
    return httpx.post(f"{gateway.url}/v1/pipelines/stream", json={"script": '{"outputs": 1}'}).status_code == 200


def last_data(lines: Iterator[str]) -> dict[str, Any]:
    """The data of the last event, without OpenAI's ``[DONE]``."""
    found = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    data: dict[str, Any] = json.loads(next(each for each in reversed(found) if each != "[DONE]"))
    return data


def last_events(triton: EmbeddedTriton, gateway: GatewayProcess) -> dict[str, str]:
    """Kills the process below a stream for each way of reading. Returns the last event of each."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=PATIENCE_S))
        started = client.post("/v1/streams", json={"pipeline": "stream", "inputs": {"script": SCRIPT}})
        answers = {way: client.stream("POST", path, json=body) for way, (path, body) in WAYS.items()}
        answers["streams"] = client.stream("GET", started.json()["url"])
        streams = {way: lines_of(stack.enter_context(answer)) for way, answer in answers.items()}
        for lines in streams.values():
            next(line for line in lines if line.startswith("data:"))
        kill_the_process_of(triton)
        return {way: json.dumps(last_data(lines)) for way, lines in streams.items()}


def test_streams_of_a_dead_process_end_with_a_retryable_error(
    own_triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    """Triton 2.51 itself aborts after some kills. Then the test begins anew with the next Triton."""
    for _ in range(3):
        triton = own_triton.pid
        found = last_events(own_triton, gateway)
        if not any("Triton cannot be reached" in event for event in found.values()):
            break
        wait_for_new_triton(gateway, own_triton, triton)
    for way, event in found.items():
        assert "The process of the model died before the stream was complete." in event, way
    eventually(lambda: works_again(gateway))
