"""KServe's REST client: the same calls to Triton's own HTTP endpoint and to the gateway."""

import subprocess
from pathlib import Path

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import Outcomes, RunProgram, error_of
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.toolkit.environments import locked_environment
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually

pytestmark = pytest.mark.full

PROGRAM = "kserve_calls.py"


@pytest.fixture(scope="module")
def kserve(require: Require) -> Path:
    return locked_environment("kserve", require) / "python3"


@pytest.fixture(scope="module")
def theirs(
    kserve: Path, triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Outcomes:
    return run_program(kserve, PROGRAM, triton.http_url, tmp_path_factory.mktemp("triton") / "notice")


@pytest.fixture(scope="module")
def ours(kserve: Path, gateway: GatewayProcess, notice: Path, run_program: RunProgram) -> Outcomes:
    return run_program(kserve, PROGRAM, gateway.url, notice)


def test_answers_and_readiness_equal_those_of_triton(theirs: Outcomes, ours: Outcomes) -> None:
    for call in ("json", "binary", "binary in, json out", "vector"):
        assert "error" not in theirs[call]
        assert ours[call] == theirs[call]
    for call, expected in (("model ready", True), ("unknown model ready", False)):
        assert theirs[call] is ours[call] is expected


def test_health_works_where_the_client_fails_with_triton(theirs: Outcomes, ours: Outcomes) -> None:
    """Triton's answer has no body, but the client expects JSON."""
    for call in ("server live", "server ready"):
        assert (theirs[call]["error"], ours[call]) == ("JSONDecodeError", True)


def test_errors_have_the_status_of_triton_and_a_message(theirs: Outcomes, ours: Outcomes) -> None:
    """The client shows no message of a model's error of Triton."""
    for call, status in (("unknown model", 404), ("wrong shape", 400), ("failed model", 500)):
        assert error_of(ours[call]) == error_of(theirs[call]) == ("HTTPStatusError", status)
        assert not ours[call]["message"].startswith(", ")
        assert "secret" not in ours[call]["message"]
    assert theirs["failed model"]["message"].startswith(", ")


def test_a_disconnect_cancels_the_model(ours: Outcomes, notice: Path) -> None:
    assert ours["left"]["error"] == "ReadTimeout"
    eventually(lambda: notice.exists() and notice.read_text() != "")
    assert notice.read_text().split()[1] == "0"


def test_the_documented_program_runs(kserve: Path, gateway: GatewayProcess) -> None:
    blocks = blocks_of(ROOT / "docs" / "how-to" / "migration.md")
    (program,) = [text for language, text in blocks if language == "python" and "kserve" in text]
    code = program.replace("http://127.0.0.1:8080", gateway.url)
    done = subprocess.run([kserve, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n[1, 384]\n"
