"""In a JSON log each line is JSON, in each mode and phase: with GATEWAY_LOG_FORMAT=json, and without a terminal."""

import json
import os
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.some_models import embedded
from tests.toolkit.connections import workers_of
from tests.toolkit.processes import LIVE, START_S, GatewayProcess, free_ports, running_gateway
from tests.toolkit.waiting import eventually

JSON = {"log_format": "json", "host": "0.0.0.0"}
LARGE = """
pipelines:
  large:
    model: scripted_large
    inputs: {file: {tensor: FILE, kind: binary}}
    outputs: {sum: {tensor: SUM}}
    sample: {file: sample.bin}
"""


def messages(gateway: GatewayProcess) -> list[str]:
    """The messages of all lines. Raises ValueError for a line that is not JSON."""
    return [json.loads(line)["message"] for line in gateway.log.splitlines()]


def test_a_gateway_with_a_remote_triton(triton: EmbeddedTriton, tmp_path: Path) -> None:
    settings = JSON | {"triton_url": triton.grpc_url, "config": str(LIVE / "gateway.yaml"), "workers": "2"}
    with running_gateway(tmp_path, **settings, shutdown_delay_s="0.2") as gateway:
        eventually(lambda: "Try: " in gateway.log)
        os.kill(workers_of(gateway)[-1], signal.SIGKILL)
        eventually(lambda: "is replaced" in gateway.log)
        gateway.process.terminate()
        gateway.process.wait(START_S)
        found = messages(gateway)
    port = gateway.url.rpartition(":")[2]
    assert f"triton-gateway is ready: http://127.0.0.1:{port}/" in found
    assert any(each.startswith("draining") for each in found)


def test_a_gateway_that_waits_for_triton(tmp_path: Path) -> None:
    styles = {"json": JSON, "auto": {}}
    addresses = {style: f"127.0.0.1:{port}" for style, port in zip(styles, free_ports(2), strict=True)}
    with ExitStack() as stack:
        waiting = {
            style: stack.enter_context(
                running_gateway(tmp_path / style, ready=False, triton_url=addresses[style], **settings)
            )
            for style, settings in styles.items()
        }
        eventually(lambda: all("Waiting for Triton" in gateway.log for gateway in waiting.values()))
        for style, gateway in waiting.items():
            assert f"Waiting for Triton at {addresses[style]}." in messages(gateway), style


def test_a_gateway_with_an_embedded_triton(tmp_path: Path, models_venv: Path) -> None:
    settings = embedded(tmp_path, models_venv, ["scripted"], ["scripted"])
    with running_gateway(tmp_path / "gateway", **settings) as gateway:
        eventually(lambda: "Try: " in gateway.log)
        assert any(each.startswith("Triton: 1 of 1 models ready") for each in messages(gateway))


def test_the_printed_call_needs_no_file(triton: EmbeddedTriton, tmp_path: Path) -> None:
    """The sample's file is in the folder of gateway.yaml, and the gateway runs in another folder."""
    (tmp_path / "sample.bin").write_bytes(b"\x01\x02")
    (tmp_path / "gateway.yaml").write_text(LARGE)
    settings = JSON | {"triton_url": triton.grpc_url, "config": str(tmp_path / "gateway.yaml")}
    with running_gateway(tmp_path / "elsewhere", **settings) as gateway:
        eventually(lambda: "Try: " in gateway.log)
        (command,) = [each.removeprefix("Try: ") for each in messages(gateway) if each.startswith("Try: ")]
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path / "elsewhere", capture_output=True, check=True)
    assert "examples/sample" in command
    assert re.search(r'"sum"', done.stdout.decode())
