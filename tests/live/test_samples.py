"""Runs the code samples of the reference pipelines in the root folder of the repository, as a user does."""

import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import Require
from tests.live.speech import SAMPLE_TEXT

ROOT = Path(__file__).parents[2]
PIPELINES: dict[str, dict[str, object]] = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]


def sample(client: httpx.Client, pipeline: str, language: str) -> str:
    text: str = client.get(f"/v1/pipelines/{pipeline}").json()["samples"][language]
    return text


def output_of(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_curl(client: httpx.Client, require: Require, pipeline: str) -> None:
    require(shutil.which("curl"), "curl is not installed: `make system-packages` installs it")
    command = sample(client, pipeline, "curl").replace("curl ", "curl --silent --show-error --fail-with-body ")
    assert output_of(["sh", "-c", command]).startswith("{" if pipeline != "listen" else f'{{"text":"{SAMPLE_TEXT}"')


def test_curl_of_a_stream(client: httpx.Client, require: Require) -> None:
    require(shutil.which("curl"), "curl is not installed: `make system-packages` installs it")
    assert "event: done" in output_of(["sh", "-c", sample(client, "write", "curl_stream")])


@pytest.mark.parametrize("pipeline", ["ocr", "embed", "listen"])
def test_javascript(client: httpx.Client, require: Require, pipeline: str) -> None:
    require(shutil.which("node"), "node is not installed: `make system-packages` installs it")
    answer = output_of(["node", "--no-warnings", "--input-type=module"], sample(client, pipeline, "javascript"))
    assert answer.startswith("{")
    assert "request_id" not in answer


def test_python(client: httpx.Client) -> None:
    """One interpreter runs all samples, because it takes a second to import httpx."""
    programs = [sample(client, pipeline, "python") for pipeline in ("ocr", "embed", "listen")]
    printed = output_of([sys.executable, "-c", "\n".join(programs)]).splitlines()
    assert [line[:1] for line in printed] == ["{", "{", "{"]
