"""Runs what the chart runs: the sidecar's arguments and probe, and `helm test`."""

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.launcher.embedded_triton import GuardedTriton
from app.launcher.launch import EmbeddedOptions, Launch, Ports
from app.triton.connect import open_transport
from app.triton.repository import served_repository
from app.triton.triton_engine import TritonEngine
from tests.conftest import Require
from tests.helm.rendering import CHART, Document, environment_of, render, the, triton_container
from tests.toolkit.processes import GatewayProcess

START_S = 60.0


@dataclass(frozen=True)
class SidecarLaunch(Launch):
    """Starts the Triton of the wheel with the arguments of a container, but with local paths and ports."""

    container: Document = dataclasses.field(default_factory=dict)

    def command(self) -> list[str]:
        local = {
            "--model-repository": str(self.repository.path),
            "--grpc-port": str(self.ports.grpc),
            "--http-port": str(self.ports.http),
            "--metrics-port": str(self.ports.metrics),
            "--metrics-address": "127.0.0.1",
        }
        parts = [argument.partition("=") for argument in self.container["args"][1:]]
        own = [f"--id={self.nonce}", f"--backend-directory={self.folder}"]
        shm = f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}"
        return [
            str(self.models.executable),
            *own,
            shm,
            *(f"{n}={local.get(n, v)}" if v else n for n, _, v in parts),
        ]

    def is_live(self) -> bool:
        """Uses the command of the container's probe."""
        probe = self.container["livenessProbe"]["exec"]["command"]
        command = [argument.replace(":8000/", f":{self.ports.http}/") for argument in probe]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture
def repository_with_a_broken_model(tmp_path: Path) -> Path:
    for name in ("valid", "broken"):
        shutil.copytree(Path(__file__).parent / "models" / "scripted", tmp_path / name)
        config = tmp_path / name / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "scripted"', f'name: "{name}"'))
    (tmp_path / "broken" / "1" / "model.py").write_text("raise RuntimeError('cannot be imported')\n")
    return tmp_path


async def test_triton_starts_with_the_sidecars_arguments(
    repository_with_a_broken_model: Path, models_venv: Path, require: Require
) -> None:
    require(shutil.which("curl"), "curl, which the probe of the sidecar runs, is not installed")
    container = triton_container(render(CHART / "ci" / "cpu-demo-values.yaml"))
    options = EmbeddedOptions(repository_with_a_broken_model, models_venv, read=served_repository)
    prepared = Launch.prepare(options, Ports.free())
    launch = SidecarLaunch(**vars(prepared), container=container)
    triton = await GuardedTriton.start(launch)
    try:
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(launch.is_live):
                assert not triton.ended.done(), triton.log.explanation()
                await asyncio.sleep(0.1)
        async with open_transport(f"127.0.0.1:{launch.ports.grpc}") as transport:
            states = {state.name: state.ready for state in await TritonEngine(transport).models()}
        assert states == {"valid": True, "broken": False}
    finally:
        await triton.kill()


def smoke_test(gateway: GatewayProcess, **tests: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of the test pod with its variables, but with the address of ``gateway``."""
    (container,) = the(render({"tests": tests}), "Pod")["spec"]["containers"]
    environment = os.environ | environment_of(container) | {"URL": gateway.url, "WAIT_S": "5"}
    command = [sys.executable, *container["command"][1:]]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def test_helm_test_calls_the_configured_pipeline_of_a_gateway_that_is_ready(gateway: GatewayProcess) -> None:
    done = smoke_test(gateway)
    assert (done.returncode, done.stdout) == (0, f"{gateway.url} is ready\n")
    done = smoke_test(gateway, pipeline="write", body='{"prompt": "The", "max_tokens": 4, "seed": 7}')
    assert done.returncode == 0, done.stderr
    assert '"finish_reason"' in done.stdout
    done = smoke_test(gateway, pipeline="nothing")
    assert done.returncode == 1
    assert "unknown_pipeline" in done.stderr
    (container,) = the(render(CHART / "ci" / "cpu-demo-values.yaml"), "Pod")["spec"]["containers"]
    demo = environment_of(container)
    assert smoke_test(gateway, pipeline=demo["PIPELINE"], body=demo["BODY"]).returncode == 0
