"""The OpenAPI document is valid, the checked-in file is up to date, and generated requests get described answers.

`make openapi` runs this module: it writes ``openapi.json`` of the reference pipelines from a running gateway with API
keys.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from app.launcher.launch import EmbeddedOptions
from tests.conftest import Require
from tests.toolkit.environments import ROOT, locked_environment
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.processes import StartGateway, running_gateway, running_triton

CHECKED_IN = ROOT / "openapi.json"
RUN_S = 300
HOOKS = Path(__file__).parent / "schemathesis" / "hooks.py"
"""The expected failures, each with its reason."""
OPTIONS = ["--checks", "all", "--max-time", str(RUN_S), "--suppress-health-check", "all", "--continue-on-failure"]


def document_at(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json", headers=headers).raise_for_status().json()
    return document


def settings_in(folder: Path) -> dict[str, str]:
    """The settings of a gateway with the reference pipelines and a key without limits, ``everything``."""
    return {
        "config": str(ROOT / "gateway.yaml"),
        "api_keys_file": str(write_keys(folder / "keys.yaml", entry("everything"))),
    }


def test_the_checked_in_document_is_up_to_date(start_gateway: StartGateway, tmp_path: Path) -> None:
    """It is that of a gateway with only the reference ``gateway.yaml``, and with API keys."""
    document = document_at(start_gateway(**settings_in(tmp_path)).url, bearer("everything"))
    assert json.loads(CHECKED_IN.read_text()) == document, "run `make openapi`"


def test_the_document_is_openapi_3_1(client: httpx.Client) -> None:
    """Validates the document of all pipelines of the test suite."""
    document = document_at(str(client.base_url).rstrip("/"))
    assert document["openapi"].startswith("3.1.")
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_check_of_schemathesis_holds_for_five_minutes(
    require: Require, models_venv: Path, tmp_path: Path
) -> None:
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


def write() -> None:
    """Starts Triton with the reference models and a gateway, and writes the document of the gateway."""
    with running_triton(EmbeddedOptions(ROOT / "triton_models", ROOT / ".venv-triton")) as triton:
        folder = Path(tempfile.mkdtemp())
        with running_gateway(folder, triton_url=triton.grpc_url, **settings_in(folder)) as gateway:
            document = document_at(gateway.url, bearer("everything"))
            CHECKED_IN.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
