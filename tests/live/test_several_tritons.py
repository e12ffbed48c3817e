"""One gateway with two real Tritons that are killed, stopped or lack a model. Each request ends exactly once."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from tritonclient.grpc import service_pb2

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions, Ports
from app.triton.connect import call_control, open_transport
from app.triton.triton_engine import TritonEngine
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton, scripted_models
from tests.toolkit.waiting import PATIENCE_S, eventually

CONFIG = """
pipelines:
  safe:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    sample: {script: "{}"}
    idempotent: true
    timeout_s: 20
  once:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    timeout_s: 20
"""


@pytest.fixture(scope="module")
def tritons(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[list[EmbeddedTriton]]:
    """Two Tritons on two addresses with the same ports. A killed Triton restarts."""
    repository = scripted_models(tmp_path_factory.mktemp("several") / "repository")
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


@pytest.fixture(scope="module")
def own_gateway(tritons: list[EmbeddedTriton], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "gateway.yaml").write_text(CONFIG)
    addresses = ",".join(triton.grpc_url for triton in tritons)
    with running_gateway(folder / "gateway", triton_url=addresses, config=str(folder / "gateway.yaml")) as running:
        yield running


@pytest.fixture
def gateway(own_gateway: GatewayProcess) -> GatewayProcess:
    """The gateway, with both Tritons up."""
    eventually(lambda: set(states(own_gateway).values()) == {"up"})
    return own_gateway


def states(gateway: GatewayProcess) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{gateway.admin_url}/health/ready").json()["tritons"]
    return found


def calls(gateway: GatewayProcess, triton: EmbeddedTriton) -> float:
    return gateway.metric("triton_calls_by_address_total", address=triton.grpc_url, code="OK")


def wait_until_both_answer(gateway: GatewayProcess, tritons: list[EmbeddedTriton]) -> None:
    """Waits until each Triton has answered more than ten further calls."""
    before = {triton.grpc_url: calls(gateway, triton) for triton in tritons}
    eventually(lambda: all(calls(gateway, each) > before[each.grpc_url] + 10 for each in tritons))


class Load:
    """Closed-loop callers of one pipeline.

    Attributes:
        answers: the number of answers by status.
        sent: the number of requests.
    """

    def __init__(self, gateway: GatewayProcess, pipeline: str) -> None:
        self.answers: Counter[int] = Counter()
        self.sent = 0
        self._gateway = gateway
        self._pipeline = pipeline
        self._counted_before = gateway.metric("requests_total", pipeline=pipeline)
        self._url = f"{gateway.url}/v1/pipelines/{pipeline}"
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def running(self, callers: int = 4) -> Iterator[None]:
        with ThreadPoolExecutor(callers) as pool:
            for _ in range(callers):
                pool.submit(self._call)
            try:
                yield
            finally:
                self._is_over.set()

    def balances(self) -> bool:
        """Returns whether each request has exactly one answer and is counted exactly once."""
        counted = self._gateway.metric("requests_total", pipeline=self._pipeline) - self._counted_before
        return sum(self.answers.values()) == self.sent == counted

    def _call(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._is_over.is_set():
                with self._lock:
                    self.sent += 1
                status = client.post(self._url, json={"script": '{"sleep_s": 0.01}'}).status_code
                with self._lock:
                    self.answers[status] += 1


def test_no_request_fails_while_tritons_are_stopped_and_restart(
    gateway: GatewayProcess, tritons: list[EmbeddedTriton]
) -> None:
    killed, stopped = tritons
    load = Load(gateway, "safe")
    with load.running():
        wait_until_both_answer(gateway, tritons)
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        eventually(lambda: states(gateway)[killed.grpc_url] == "down")
        assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
        assert gateway.metric("triton_up", address=stopped.grpc_url) == 1
        eventually(lambda: states(gateway)[killed.grpc_url] == "up")
        wait_until_both_answer(gateway, tritons)
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            eventually(lambda: states(gateway)[stopped.grpc_url] == "down")
            assert gateway.metric("triton_up", address=stopped.grpc_url) == 0
            before = load.answers[200]
            eventually(lambda: load.answers[200] > before + 20)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        eventually(lambda: states(gateway)[stopped.grpc_url] == "up")
    assert set(load.answers) == {200}
    assert load.balances()
    assert gateway.metric("triton_ejections_total", address=killed.grpc_url, reason="down") >= 1


def test_requests_go_to_the_triton_that_has_the_model(gateway: GatewayProcess, tritons: list[EmbeddedTriton]) -> None:
    unloaded = tritons[0]
    asyncio.run(control(unloaded, loads=False))
    try:
        answers = [post(gateway) for _ in range(10)]
        assert answers == [200] * 10
        eventually(lambda: missing_at(gateway) == {unloaded.grpc_url: "not_ready"})
        assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
        before = calls(gateway, unloaded)
        assert [post(gateway) for _ in range(10)] == [200] * 10
        assert calls(gateway, unloaded) == before
    finally:
        asyncio.run(control(unloaded, loads=True))
    eventually(lambda: missing_at(gateway) == {})


def post(gateway: GatewayProcess, pipeline: str = "once") -> int:
    return httpx.post(f"{gateway.url}/v1/pipelines/{pipeline}", json={"script": "{}"}, timeout=PATIENCE_S).status_code


def missing_at(gateway: GatewayProcess) -> dict[str, str]:
    (once,) = (each for each in httpx.get(f"{gateway.url}/v1/pipelines").json()["pipelines"] if each["name"] == "once")
    missing: dict[str, str] = once.get("missing_at", {})
    return missing


async def control(triton: EmbeddedTriton, *, loads: bool) -> None:
    async with open_transport(triton.grpc_url) as transport:
        if loads:
            await TritonEngine(transport).reload_model("scripted")
        else:
            await call_control(transport, service_pb2.RepositoryModelUnloadRequest(model_name="scripted"), PATIENCE_S)
