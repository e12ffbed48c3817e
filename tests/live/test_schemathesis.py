"""Sends requests that schemathesis generates to the reference pipelines, with all of its checks."""

import os
import subprocess
from pathlib import Path

import pytest

from app.launcher.launch import EmbeddedOptions
from tests.conftest import Require
from tests.toolkit.environments import ROOT, locked_environment
from tests.toolkit.processes import running_gateway, running_triton

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

RUN_S = 300
HOOKS = Path(__file__).parent / "schemathesis" / "hooks.py"
"""The expected failures, each with its reason."""
OPTIONS = ["--checks", "all", "--max-time", str(RUN_S), "--suppress-health-check", "all", "--continue-on-failure"]


def test_every_check_holds_for_five_minutes(require: Require, models_venv: Path, tmp_path: Path) -> None:
    schemathesis = locked_environment("schemathesis", require) / "schemathesis"
    with running_triton(EmbeddedOptions(ROOT / "triton_models", models_venv)) as triton:
        settings = {"triton_url": triton.grpc_url, "config": str(ROOT / "gateway.yaml"), "timeout_s": "60"}
        with running_gateway(tmp_path / "gateway", **settings) as gateway:
            done = subprocess.run(
                [schemathesis, "run", f"{gateway.url}/openapi.json", *OPTIONS],
                cwd=tmp_path,
                env=os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)},
                capture_output=True,
                text=True,
                check=False,
            )
    print(done.stdout[-2000:])  # noqa: T201 - pytest shows the figures of the run with -s
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
