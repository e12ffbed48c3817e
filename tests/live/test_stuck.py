"""The gateway restarts an embedded Triton that is live but does not answer calls."""

from pathlib import Path

import httpx
import pytest

from tests.toolkit.processes import GatewayProcess, running_gateway, scripted_models
from tests.toolkit.waiting import eventually

CONFIG = """
pipelines:
  scripted:
    model: scripted
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    timeout_s: 1
    sample: {script: "{}"}
"""


def ask(gateway: GatewayProcess, script: str) -> int:
    return httpx.post(f"{gateway.url}/v1/pipelines/scripted", json={"script": script}, timeout=20).status_code


def liveness(gateway: GatewayProcess) -> int:
    return httpx.get(f"{gateway.admin_url}/health/triton").status_code


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_stuck_embedded_triton_is_restarted(tmp_path: Path, models_venv: Path, workers: str) -> None:
    """Both instances of the only model hang. The gateway cannot distinguish this from a deadlock in Triton."""
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    settings = {
        "embedded": "true",
        "workers": workers,
        "embedded_repository": str(scripted_models(tmp_path / "repository")),
        "embedded_venv": str(models_venv),
        "config": str(tmp_path / "gateway.yaml"),
    }
    with running_gateway(tmp_path / "gateway", **settings) as gateway:
        assert (ask(gateway, "{}"), liveness(gateway)) == (200, 200)
        calls = 2 * int(workers) - 1 + (workers == "1")  # at least two meet the same worker
        assert [ask(gateway, '{"sleep_s": 600}') for _ in range(calls)] == [504] * calls
        eventually(lambda: liveness(gateway) == 503, 120.0)  # an execution may take a minute
        eventually(lambda: liveness(gateway) == 200)
        eventually(lambda: httpx.get(f"{gateway.admin_url}/health/ready").status_code == 200)
        if workers == "1":
            assert ask(gateway, "{}") == 200
        else:  # the other worker may not have noticed the restart
            eventually(lambda: {ask(gateway, "{}") for _ in range(8)} == {200})
        assert gateway.log.count("Triton is stuck") == 1
