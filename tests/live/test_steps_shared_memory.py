"""What a killed gateway leaves in shared memory in the middle of steps with 16 MiB tensors, and who removes it."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import yaml
from tritonclient.grpc import InferenceServerClient

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import with_binary
from tests.live.test_shared_memory import files, registered
from tests.toolkit.processes import GatewayProcess, StartGateway, live_triton
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
name: "wide"
backend: "python"
max_batch_size: 0
input { name: "X" data_type: TYPE_FP32 dims: [4194304] }
output { name: "Y" data_type: TYPE_FP32 dims: [4194304] }
instance_group [ { kind: KIND_CPU count: 2 } ]
"""
PIPELINES = yaml.safe_load("""
chain:
  inputs: {x: {tensor: X}}
  steps:
    one: {model: wide, inputs: {X: X}}
    two: {model: wide, inputs: {X: one.Y}}
    three: {model: wide, inputs: {X: two.Y}}
  outputs: {y: {tensor: three.Y}}
""")


def write_model(folder: Path) -> Path:
    (folder / "wide" / "1").mkdir(parents=True)
    (folder / "wide" / "config.pbtxt").write_text(CONFIG)
    (folder / "wide" / "1" / "model.py").write_text(SCRIPT)
    return folder


triton = live_triton(write_model)


def infer(gateway: GatewayProcess, sleep_s: float = 0.0) -> httpx.Response:
    """The second step takes ``sleep_s``."""
    x = np.zeros(ELEMENTS, np.float32)
    x[1] = sleep_s
    sent = {"name": "X", "datatype": "FP32", "shape": [ELEMENTS], "parameters": {"binary_data_size": x.nbytes}}
    body, headers = with_binary({"inputs": [sent], "parameters": {"binary_data_output": True}}, x.tobytes())
    return httpx.post(f"{gateway.url}/v2/models/chain/infer", content=body, headers=headers, timeout=60)


def executions(triton: EmbeddedTriton) -> int:
    with InferenceServerClient(triton.grpc_url) as client:
        (stats,) = client.get_inference_statistics("wide").model_stats
        return int(stats.execution_count)


def test_the_next_gateway_removes_what_a_killed_one_left_in_the_middle_of_steps(
    triton: EmbeddedTriton, start_gateway: StartGateway, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps({"pipelines": PIPELINES, "oip": {"models": ["chain"]}}))
    settings = {
        "config": str(config),
        "max_body_bytes": str(64 * 2**20),
        "shared_memory_bytes": str(256 * 2**20),
    }
    killed = start_gateway(**settings)
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(infer, killed, SLEEP_S)
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
    eventually(lambda: executions(triton) == 2)
    gateway = start_gateway(**settings)
    eventually(lambda: not set().union(*map(files, orphans)))
    assert registered(triton) >= orphans
    answer = infer(gateway)
    assert answer.status_code == 200, answer.text[:500]
    assert np.frombuffer(answer.content[-4 * ELEMENTS :], np.float32)[:3].tolist() == [3, 0, 0]
    eventually(lambda: not registered(triton) & orphans)
    gateway.process.terminate()
    gateway.process.wait(PATIENCE_S)
    assert not registered(triton)
