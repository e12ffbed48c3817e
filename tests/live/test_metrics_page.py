"""Checks the metrics page with ``promtool`` of Prometheus."""

import shutil
import subprocess
from pathlib import Path

import httpx

from tests.conftest import Require
from tests.live.conftest import GatewayProcess

BLANK = Path(__file__).parents[2] / "samples" / "blank.png"


def test_promtool_reports_nothing(gateway: GatewayProcess, client: httpx.Client, require: Require) -> None:
    """The page has samples of an answer, a stream, an invalid request and an early exit."""
    promtool = shutil.which("promtool")
    require(promtool, "promtool is not installed: `make system-packages` installs it")
    client.post("/v1/pipelines/write", json={"prompt": "The", "max_tokens": 2})
    client.post("/v1/pipelines/write/stream", json={"prompt": "The", "max_tokens": 2})
    client.post("/v1/pipelines/write", json={})
    client.post("/v1/pipelines/ocr", files={"image": BLANK.read_bytes()})
    page = httpx.get(f"{gateway.admin_url}/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    done = subprocess.run(
        [str(promtool), "check", "metrics"], input=page.text, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
