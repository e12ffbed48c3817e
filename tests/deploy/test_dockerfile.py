"""Checks of the Dockerfile's text, without a build."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def stages() -> dict[str, str]:
    """Returns the text of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-fail", ROOT / "Dockerfile"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_the_base_image_is_the_first_build_argument() -> None:
    instructions = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    assert instructions[0].startswith("ARG BASE_IMAGE=")


def test_a_build_without_a_target_creates_the_gateway_image() -> None:
    assert list(stages())[-1] == "gateway"


@pytest.mark.parametrize("stage", ["gateway", "triton"])
def test_the_image_runs_as_an_unprivileged_numeric_user(stage: str) -> None:
    user = re.search(r"^USER (\d+):(\d+)$", stages()[stage], re.MULTILINE)
    assert user is not None
    assert int(user[1]) >= 10001


@pytest.mark.parametrize("stage", ["gateway", "triton"])
def test_the_image_needs_no_shell_to_run(stage: str) -> None:
    for instruction in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", stages()[stage], re.MULTILINE):
        assert instruction.startswith("[")
    assert "RUN" not in stages()[stage]


@pytest.mark.parametrize("stage", ["gateway", "triton"])
def test_the_image_has_oci_labels(stage: str) -> None:
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", stages()[stage]))
    assert {"title", "description", "version", "revision"} <= labels


def test_every_package_is_locked_by_its_hash() -> None:
    installs = re.findall(r"pip (?:--python \S+ )?install.*?(?=&&|\n(?! ))", DOCKERFILE, re.DOTALL)
    assert len(installs) == 4
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)


def test_the_copied_files_match_the_build_context() -> None:
    copied = {
        source.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    included = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert IGNORED[1] == "*"
    assert copied == included
    assert all((ROOT / name).exists() for name in included)
