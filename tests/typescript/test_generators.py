"""``openapi.json`` passes the linters, and the code that generators write from it compiles and works.

The programs in ``generators/`` send one image as JSON, as a form and as bytes, and read a typed error.
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Require
from tests.live.test_openapi import CHECKED_IN, ROOT, document_at, settings_in
from tests.toolkit.environments import npm_environment
from tests.toolkit.keys import key_text
from tests.toolkit.processes import GatewayProcess, StartGateway
from tests.typescript.test_client import call

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

FILES = Path(__file__).parent / "generators"
BLANK = "data:image/png;base64," + base64.b64encode((ROOT / "samples" / "blank.png").read_bytes()).decode()
GENERATE = {
    "openapi_typescript": ["openapi-typescript", "openapi.json", "-o", "openapi-typescript.ts"],
    "hey_api": [
        *("openapi-ts", "-i", "openapi.json", "-o", "hey-api"),
        *("-p", "@hey-api/typescript", "@hey-api/sdk", "@hey-api/client-fetch"),
    ],
    "orval": ["orval", "--config", "orval.config.ts"],
}
"""The calls that docs/how-to/react.md shows."""


@pytest.fixture(scope="module")
def tools(require: Require) -> Path:
    folder = npm_environment("openapi-generators", FILES, require)
    shutil.copy(CHECKED_IN, folder)
    return folder


@pytest.fixture(scope="module")
def generated(tools: Path) -> Path:
    for command in GENERATE.values():
        call(tools, *command)
    return tools


@pytest.fixture(scope="module", params=["checked in", "without keys"])
def document(request: pytest.FixtureRequest, tools: Path, gateway: GatewayProcess) -> str:
    """The name of the file: the checked-in document, or that of the models of the test suite, without keys."""
    if request.param == "checked in":
        return "openapi.json"
    (tools / "without-keys.json").write_text(json.dumps(document_at(gateway.url)))
    return "without-keys.json"


def test_redocly_and_spectral_find_no_error(tools: Path, document: str) -> None:
    report = json.loads(call(tools, "redocly", "lint", document, "--config=redocly.yaml", "--format=json"))
    assert report["totals"]["errors"] == 0
    assert {problem["ruleId"] for problem in report["problems"]} <= {"no-unused-components"}
    command = ["spectral", "lint", document, "--ruleset=spectral.yaml", "--format=json", "--quiet"]
    found: list[dict[str, Any]] = json.loads(call(tools, *command))
    assert {problem["code"] for problem in found} <= {"oas3-unused-component"}


def test_the_generated_code_compiles_in_strict_mode(generated: Path) -> None:
    call(generated, "tsc", "--project", "tsconfig.json")


def printed_by(folder: Path, name: str, gateway: GatewayProcess, *arguments: str) -> Any:
    call(folder, "esbuild", f"{name}.ts", "--bundle", "--platform=node", "--format=esm", f"--outfile={name}.mjs")
    return json.loads(call(folder, "node", f"{name}.mjs", gateway.url, key_text("everything"), *arguments))


@pytest.mark.parametrize("name", GENERATE)
def test_the_programs_send_json_a_form_and_bytes(
    generated: Path, start_gateway: StartGateway, tmp_path: Path, name: str
) -> None:
    gateway = start_gateway(**settings_in(tmp_path))
    printed = printed_by(generated, name, gateway, BLANK)
    assert printed == ["no_text"] * 3 + ["length", "invalid_input"]


def test_a_stream_of_hey_api_never_shows_a_second_answer(
    generated: Path, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """The repeated requests are refused, because the second answer would follow the first part of the first one."""
    gateway = start_gateway(**settings_in(tmp_path))
    found = printed_by(generated, "hey_api_stream", gateway)
    assert found["statuses"] == [200, 400, 400]
    assert found["ids"] == ["1", "2", "3"]
