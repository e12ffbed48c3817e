"""Steps with large tensors: what a killed gateway leaves in shared memory, and a model that is away for a while."""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import numpy as np
import pytest
import yaml
from tritonclient.grpc import InferenceServerClient

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import with_binary
from tests.live.test_shared_memory import files, registered
from tests.toolkit.processes import GatewayProcess, StartGateway, live_triton, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually

ELEMENTS = 4 * 2**20
SLEEP_S = 2.0
SCRIPT = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(each, "X").as_numpy()) for each in requests]

    def answer(self, x):
        y = x.copy()
        y[0] += 1
        if y[0] == 2:
            time.sleep(float(y[1]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input {{ name: "X" data_type: TYPE_FP32 dims: [{elements}] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [{elements}] }}
instance_group [ {{ kind: KIND_CPU count: 2 }} ]
"""
SIZES = {"wide": ELEMENTS, "first": 2**18, "second": 2**18}
"""By model, the elements of its tensors."""
PIPELINES = yaml.safe_load("""
chain:
  inputs: {x: {tensor: X}}
  steps:
    one: {model: wide, inputs: {X: X}}
    two: {model: wide, inputs: {X: one.Y}}
    three: {model: wide, inputs: {X: two.Y}}
  outputs: {y: {tensor: three.Y}}
pair:
  inputs: {x: {tensor: X}}
  steps:
    one: {model: first, inputs: {X: X}}
    two: {model: second, inputs: {X: one.Y}}
  outputs: {y: {tensor: two.Y}}
alone:
  inputs: {x: {tensor: X}}
  steps: {one: {model: first, inputs: {X: X}}}
  outputs: {y: {tensor: one.Y}}
""")


def write_models(folder: Path) -> Path:
    for name, elements in SIZES.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(name=name, elements=elements))
        (folder / name / "1" / "model.py").write_text(SCRIPT)
    return folder


triton = live_triton(write_models)


def infer(gateway: GatewayProcess, pipeline: str = "chain", sleep_s: float = 0.0) -> httpx.Response:
    """The second step takes ``sleep_s``."""
    x = np.zeros(SIZES["wide" if pipeline == "chain" else "first"], np.float32)
    x[1] = sleep_s
    sent = {"name": "X", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    body, headers = with_binary({"inputs": [sent], "parameters": {"binary_data_output": True}}, x.tobytes())
    return httpx.post(f"{gateway.url}/v2/models/{pipeline}/infer", content=body, headers=headers, timeout=60)


@pytest.fixture
def start(start_gateway: StartGateway, tmp_path: Path) -> Callable[[], GatewayProcess]:
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps({"pipelines": PIPELINES, "oip": {"models": [*PIPELINES]}}))
    sizes = {"max_body_bytes": str(64 * 2**20), "shared_memory_bytes": str(256 * 2**20)}
    return lambda: start_gateway(config=str(config), **sizes)


def executions(triton: EmbeddedTriton) -> int:
    with InferenceServerClient(triton.grpc_url) as client:
        (stats,) = client.get_inference_statistics("wide").model_stats
        return int(stats.execution_count)


def test_the_next_gateway_removes_what_a_killed_one_left_in_the_middle_of_steps(
    triton: EmbeddedTriton, start: Callable[[], GatewayProcess]
) -> None:
    killed, before = start(), executions(triton)
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(infer, killed, sleep_s=SLEEP_S)
        eventually(lambda: killed.metric("steps_total", step="one", outcome="ok") == 1)
        eventually(lambda: len(registered(triton)) >= 2)
        orphans = registered(triton)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(PATIENCE_S)
        assert isinstance(request.exception(), httpx.TransportError)
    assert registered(triton) >= orphans, "Triton has the memory of both steps"
    (lock,) = set().union(*map(files, orphans))
    assert lock.endswith(".lock"), "the regions have no names"
    # Triton refuses to unmap a region while a model uses it. The gateway tries again only after a minute.
    eventually(lambda: executions(triton) == before + 2)
    gateway = start()
    eventually(lambda: not set().union(*map(files, orphans)))
    assert registered(triton) >= orphans
    answer = infer(gateway)
    assert answer.status_code == 200, answer.text[:500]
    assert np.frombuffer(answer.content[-4 * ELEMENTS :], np.float32)[:3].tolist() == [3, 0, 0]
    eventually(lambda: not registered(triton) & orphans)
    gateway.process.terminate()
    gateway.process.wait(PATIENCE_S)
    assert not registered(triton)


def test_the_model_of_a_step_is_unloaded_and_loaded_again_under_load(
    triton: EmbeddedTriton, start: Callable[[], GatewayProcess]
) -> None:
    gateway, seen, is_over = start(), list[tuple[str, float, httpx.Response]](), Event()

    def call(pipeline: str) -> None:
        while not is_over.is_set():
            began = time.monotonic()
            seen.append((pipeline, began, infer(gateway, pipeline)))

    def change(what: str) -> float:
        """Returns the time after it."""
        url = f"{triton.http_url}/v2/repository/models/second/{what}"
        httpx.post(url, timeout=PATIENCE_S).raise_for_status()
        return time.monotonic()

    def answered(since: float) -> bool:
        return any(name == "pair" and began > since and each.is_success for name, began, each in seen)

    with ThreadPoolExecutor(6) as threads:
        callers = [threads.submit(call, pipeline) for pipeline in ("pair", "pair", "pair", "pair", "alone", "alone")]
        try:
            eventually(lambda: answered(0))
            unloaded = time.monotonic()
            change("unload")
            eventually(lambda: any(each.is_error for _, _, each in seen))
            loaded = change("load")
            eventually(lambda: answered(loaded))
            wait_until_ready(gateway)
            ready = time.monotonic()
            eventually(lambda: answered(ready))
        finally:
            is_over.set()
        for each in callers:
            each.result()
    failed = [(name, began, each) for name, began, each in seen if not each.is_success]
    assert {(name, each.status_code) for name, _, each in failed} == {("pair", 503)}, {each.text for *_, each in failed}
    assert all(unloaded - 5 < began < ready for _, began, _ in failed)
    eventually(lambda: gateway.metric("requests_running") == 0)
    eventually(lambda: gateway.metric("shared_memory_bytes", state="quarantined") == 0)
    assert gateway.metric("shared_memory_bytes", state="used") == 0
    with ThreadPoolExecutor(16) as threads:
        assert {each.status_code for each in threads.map(infer, [gateway] * 32, ["pair"] * 32)} == {200}
    assert "Traceback" not in gateway.log
    assert "never retrieved" not in gateway.log
