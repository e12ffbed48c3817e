"""Compares the linter with the real Triton: which errors Triton rejects, and which only the linter finds."""

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as client
import yaml
from tritonclient.utils import InferenceServerException

from app.cli import main
from app.launcher.embedded_triton import GuardedTriton
from app.launcher.launch import EmbeddedOptions, Launch, Ports, ServedRepository
from app.lint.findings import known_faults
from tests.toolkit.broken_repositories import BROKEN, Repository, sound
from tests.toolkit.processes import EXIT_S, START_S, GatewayProcess, running_triton
from tests.toolkit.refused_configurations import REFUSED, Refused, ident
from tests.toolkit.waiting import eventually

Outcomes = Callable[..., Awaitable[tuple[set[str], str]]]
Triton = tuple[client.InferenceServerClient, Path]


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[Triton]:
    """A Triton with explicit model control, and its repository, which is valid at the start."""
    repository = tmp_path_factory.mktemp("explicit")
    sound(Repository(repository))
    with running_triton(EmbeddedOptions(repository, models_venv)) as triton:
        yield client.InferenceServerClient(triton.grpc_url), repository


def load(explicit: Triton, code: str, tmp_path: Path) -> None:
    """Adds the broken models for an error code to the valid models, and loads and unloads ``broken``.

    Triton 2.51 unloads a model after its answer, and may crash if another one of the same name is loaded meanwhile.
    """
    server, repository = explicit
    BROKEN[code].write(tmp_path)
    for folder in (tmp_path / "models").iterdir():
        if not (repository / folder.name).exists():
            folder.rename(repository / folder.name)
    try:
        server.load_model("broken")
    finally:
        server.unload_model("broken")
        eventually(lambda: "UNLOADING" not in {each.state for each in server.get_model_repository_index().models})
        (repository / "broken").rename(tmp_path / "was_loaded")


# Triton 2.51 never answers a call that loads a Python model without its script, and may crash after a wrong warm-up.
@pytest.mark.parametrize(
    "code", sorted({code for code in BROKEN if BROKEN[code].refused} - {"missing-script", "invalid-warmup"})
)
def test_triton_refuses_the_models_with_these_errors(explicit: Triton, code: str, tmp_path: Path) -> None:
    with pytest.raises(InferenceServerException, match="broken"):
        load(explicit, code, tmp_path)


# An auto-completed model needs auto-completion, which is disabled in this Triton, and vLLM is not installed.
@pytest.mark.parametrize(
    "code", sorted({code for code in BROKEN if not BROKEN[code].refused} - {"unknown-edge", "no-health-check"})
)
def test_triton_loads_models_that_only_the_linter_rejects(explicit: Triton, code: str, tmp_path: Path) -> None:
    load(explicit, code, tmp_path)


@pytest.fixture
def outcomes(caplog: pytest.LogCaptureFixture, models_venv: Path) -> Outcomes:
    """Returns the models that a Triton loads from a repository, and its log."""

    async def outcomes(repository: Path, *, completes: bool = False) -> tuple[set[str], str]:
        options = EmbeddedOptions(
            repository,
            models_venv,
            exit_timeout_s=EXIT_S,
            read=lambda path: ServedRepository(
                path, tuple(each.name for each in path.iterdir()), is_complete=not completes
            ),
        )
        with caplog.at_level(logging.DEBUG, "app.launcher.embedded_triton"):
            triton = await GuardedTriton.start(Launch.prepare(options, Ports.free()))
            async with asyncio.timeout(START_S):
                while not triton.ended.done() and STARTED not in caplog.text:
                    await asyncio.sleep(0.1)
            await triton.stop()
        return {*triton.log.loaded}, caplog.text

    return outcomes


STARTED = "Started GRPCInferenceService"
CRASHING = ("initial_state", "warmup")
"""Triton 2.51 starts a process for these models before it refuses them, and may crash (signal 11) at its end."""


def may_crash(case: Refused) -> bool:
    return any(word in case.text for word in CRASHING)


@pytest.mark.full
@pytest.mark.parametrize("completes", [False, True])
async def test_triton_refuses_each_configuration_and_loads_its_neighbour(
    outcomes: Outcomes, tmp_path: Path, *, completes: bool
) -> None:
    ident(tmp_path)
    cases = {f"case_{number}": case for number, case in enumerate(REFUSED)}
    for name, case in cases.items():
        case.write(tmp_path, name)
        if may_crash(case):
            shutil.rmtree(tmp_path / f"{name}_broken")
    loaded, log = await outcomes(tmp_path, completes=completes)
    assert loaded == {"ident", *(f"{name}_sound" for name in cases)}
    for name, case in cases.items():
        reasons = [line for line in log.splitlines() if f"{name}_broken" in line]
        if not may_crash(case) and not (completes and "must specify 'dims'" in case.triton):
            assert any(case.triton in line for line in reasons), case


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REFUSED if may_crash(case)], ids=lambda case: case.text)
async def test_triton_refuses_the_others_or_crashes(outcomes: Outcomes, tmp_path: Path, case: Refused) -> None:
    case.write(tmp_path, "m")
    loaded, log = await outcomes(tmp_path)
    assert "m_broken" not in loaded
    assert case.triton in log or STARTED not in log


def test_check_finds_only_known_faults_in_the_running_reference_models(
    gateway: GatewayProcess,
    triton: object,
    repository: Path,
    config_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models, pipelines = len(list(repository.iterdir())), len(yaml.safe_load(config_path.read_text())["pipelines"])
    assert main(["check", "--triton", triton.grpc_url, "--config", str(config_path), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["models"], report["pipelines"]) == (models, pipelines)
    assert report["known_faults"].startswith("Triton 2.51 has ")
    assert {each["code"] for each in report["findings"]} <= known_faults().faults.keys()
