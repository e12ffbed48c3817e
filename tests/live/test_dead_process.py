"""A model whose process or engine died: Triton 2.51 still reports it as ready. Its streams end, and it is repaired."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.triton.connect import open_transport
from app.triton.triton_engine import TritonEngine
from tests.live.sessions import wait_for_new_triton
from tests.toolkit.events import lines_of
from tests.toolkit.processes import GatewayProcess, configured_gateway, live_triton, scripted_models, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually

CONFIG = """
pipelines:
  scripted:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    sample: {script: "{}"}
"""
STREAM_CONFIG = """
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
LLM = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
LLM_CONFIG = """
pipelines:
  llm:
    model: llm
    inputs: {prompt: {tensor: text_input, kind: text}}
    outputs: {text: {tensor: text_output, kind: text}}
    stream: true
    engine_errors: [EngineCore encountered an issue, EngineDeadError]
    sample: {prompt: Hi}
"""


def write_models(repository: Path) -> None:
    scripted_models(repository)
    (repository / "llm" / "1").mkdir(parents=True)
    (repository / "llm" / "config.pbtxt").write_text(LLM)
    (repository / "llm" / "1" / "model.py").symlink_to(Path(__file__).parent / "engine_model.py")


own_triton = live_triton(write_models, restarts=True, first_restart_s=0.2)
gateway_of = partial(configured_gateway, config=CONFIG)


def processes_of(triton: int | None, model: str) -> list[int]:
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if f"/{model}/1/model.py" in arguments_of(folder) and parent_of(folder) == triton
    ]


def arguments_of(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""


def parent_of(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill_processes_of(triton: EmbeddedTriton, model: str) -> None:
    found = processes_of(triton.pid, model)
    assert len(found) == 2
    for process in found:
        os.kill(process, signal.SIGKILL)


def ask(gateway: GatewayProcess) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/pipelines/scripted", json={"script": "{}"}, timeout=PATIENCE_S)


def readiness(gateway: GatewayProcess) -> int:
    return httpx.get(f"{gateway.url}/health/ready").status_code


async def reload(url: str) -> None:
    async with open_transport(url) as channel:
        await TritonEngine(channel).reload_model("scripted")


def test_with_repair_the_model_works_again(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, triton_repair="true") as gateway:
        assert ask(gateway).status_code == 200
        kill_processes_of(own_triton, "scripted")
        first = ask(gateway)
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (503, "model_not_ready", True)
        assert int(first.headers["Retry-After"]) > 0
        assert "GATEWAY_TRITON_REPAIR" not in first.text
        eventually(lambda: "model 'scripted' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        assert [ask(gateway).status_code for _ in range(4)] == [200] * 4
        assert gateway.metric("stub_deaths_total", model="scripted") == 1


def test_without_repair_readiness_fails_until_a_reload(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    with gateway_of(own_triton, tmp_path, triton_repair="false") as gateway:
        kill_processes_of(own_triton, "scripted")
        first = ask(gateway)
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (502, "model_error", False)
        assert "GATEWAY_TRITON_REPAIR" in first.json()["hint"]
        eventually(lambda: readiness(gateway) == 503)
        assert gateway.metric("stub_deaths_total", model="scripted") == 1
        asyncio.run(reload(own_triton.grpc_url))
        wait_until_ready(gateway, PATIENCE_S)
        assert ask(gateway).status_code == 200


@pytest.mark.full
def test_several_workers_repair_the_model_once(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Every worker encounters the dead process; the supervisor counts it, repairs it, and notifies the workers."""
    with gateway_of(own_triton, tmp_path, triton_repair="true", workers="2") as gateway:
        assert {ask(gateway).status_code for _ in range(8)} == {200}
        kill_processes_of(own_triton, "scripted")
        with ThreadPoolExecutor(8) as pool:
            statuses = [answer.status_code for answer in pool.map(ask, [gateway] * 8)]
        assert statuses.count(503) >= 4
        assert set(statuses) <= {503, 200}, "the last ones may wait in Triton until the repair"
        eventually(lambda: "model 'scripted' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        eventually(lambda: [ask(gateway).status_code for _ in range(8)] == [200] * 8)
        assert gateway.metric("stub_deaths_total", model="scripted") == 1
        assert gateway.log.count("was unloaded and loaded again") == 1


def test_an_engine_that_died_is_loaded_again(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Triton still reports the model as ready, and every request fails."""

    def ask(prompt: str, path: str = "") -> httpx.Response:
        return httpx.post(f"{gateway.url}/v1/pipelines/llm{path}", json={"prompt": prompt}, timeout=PATIENCE_S)

    with configured_gateway(own_triton, tmp_path, LLM_CONFIG, triton_repair="true") as gateway:
        assert ask("Hi").status_code == 200
        first = ask("die", "/stream")
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (503, "model_not_ready", True)
        assert int(first.headers["Retry-After"]) > 0
        eventually(lambda: "model 'llm' works again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        assert ask("Hi").json() == {"text": "Hi"}
        assert gateway.metric("engine_deaths_total", model="llm") == 1


SCRIPT = json.dumps({"outputs": 1, "then": "silence"})
SENT_S = 1.0
"""The time in which a model that has sent an output gives back the lock that it shares with Triton."""
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


def test_streams_of_a_dead_process_end_with_a_retryable_error(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Triton 2.51 itself aborts after some kills. Then the test begins anew with the next Triton."""

    def works_again() -> bool:
        return httpx.post(f"{gateway.url}/v1/pipelines/stream", json={"script": '{"outputs": 1}'}).status_code == 200

    with configured_gateway(own_triton, tmp_path, STREAM_CONFIG, triton_repair="true") as gateway:
        for _ in range(3):
            triton = own_triton.pid
            found = last_events(own_triton, gateway)
            if not any("Triton cannot be reached" in event for event in found.values()):
                break
            wait_for_new_triton(gateway, own_triton, triton)
        for way, event in found.items():
            assert "The process of the model died before the stream was complete." in event, way
        eventually(works_again)
