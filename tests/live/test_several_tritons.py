"""One gateway with two real Tritons that are killed and stopped. Each request ends exactly once."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions, Ports
from tests.live.sessions import kill_triton
from tests.toolkit.processes import GatewayProcess, linked_models, running_gateway, running_triton
from tests.toolkit.waiting import eventually, repeated

CONFIG = """
pipelines:
  safe:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    sample: {script: "{}"}
    idempotent: true
    timeout_s: 20
  chain:
    inputs: {script: {tensor: SCRIPT, kind: text}}
    steps:
      one: {model: scripted, inputs: {SCRIPT: SCRIPT}}
      two: {model: scripted, inputs: {SCRIPT: SCRIPT}, after: [one]}
    outputs: {text: {tensor: two.TEXT, kind: text}}
    idempotent: true
    timeout_s: 20
"""


@pytest.fixture
def tritons(tmp_path: Path, models_venv: Path) -> Iterator[list[EmbeddedTriton]]:
    """Two Tritons on two addresses with the same ports. A killed Triton restarts."""
    repository = linked_models(tmp_path / "repository")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        ports = Ports.free("127.0.0.2")
        options = [
            EmbeddedOptions(repository, models_venv, host=f"127.0.0.{number}", ports=ports, first_restart_s=0.5)
            for number in (2, 3)
        ]
        contexts = [running_triton(each, restarts=True) for each in options]
        started = list(pool.map(lambda context: context.__enter__(), contexts))
        for context in contexts:
            stack.push(context.__exit__)
        yield started


@pytest.fixture
def gateway(tritons: list[EmbeddedTriton], tmp_path: Path) -> Iterator[GatewayProcess]:
    """The gateway, with both Tritons up."""
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    addresses = ",".join(triton.grpc_url for triton in tritons)
    with running_gateway(tmp_path / "gateway", triton_url=addresses, config=str(tmp_path / "gateway.yaml")) as running:
        eventually(lambda: {state_of(running, each) for each in tritons} == {"up"})
        yield running


def state_of(gateway: GatewayProcess, triton: EmbeddedTriton) -> str:
    return str(httpx.get(f"{gateway.admin_url}/health/ready").json()["tritons"][triton.grpc_url])


def wait_until_both_answer(gateway: GatewayProcess, tritons: list[EmbeddedTriton]) -> None:
    """Waits until each Triton has answered more than ten further calls."""

    def calls() -> list[float]:
        urls = [triton.grpc_url for triton in tritons]
        return [gateway.metric("triton_calls_by_address_total", address=url, code="OK") for url in urls]

    before = calls()
    eventually(lambda: all(now > then + 10 for now, then in zip(calls(), before, strict=True)))


def test_no_request_fails_while_tritons_are_stopped_and_restart(
    gateway: GatewayProcess, tritons: list[EmbeddedTriton]
) -> None:
    killed, stopped = tritons
    counted, statuses = gateway.metric("requests_total", transport="unary"), list[int]()

    def call(pipeline: str = "safe") -> None:
        answer = client.post(f"/v1/pipelines/{pipeline}", json={"script": '{"sleep_s": 0.01}'})
        statuses.append(answer.status_code)

    steps = partial(call, "chain")
    with httpx.Client(base_url=gateway.url, timeout=60) as client, repeated(call, call, steps, steps):
        wait_until_both_answer(gateway, tritons)
        kill_triton(killed)
        eventually(lambda: state_of(gateway, killed) == "down")
        assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
        assert gateway.metric("triton_up", address=stopped.grpc_url) == 1
        eventually(lambda: state_of(gateway, killed) == "up")
        wait_until_both_answer(gateway, tritons)
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            eventually(lambda: state_of(gateway, stopped) == "down")
            assert gateway.metric("triton_up", address=stopped.grpc_url) == 0
            before = len(statuses)
            eventually(lambda: len(statuses) > before + 20)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        eventually(lambda: state_of(gateway, stopped) == "up")
    assert set(statuses) == {200}
    assert gateway.metric("requests_total", transport="unary") - counted == len(statuses)
    assert gateway.metric("triton_ejections_total", address=killed.grpc_url, reason="down") >= 1
