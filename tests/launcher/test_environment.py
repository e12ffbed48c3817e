"""The environment of the extra ``embedded``: the real uv installs a Python and small wheels, without a network."""

import os
import zipfile
from pathlib import Path

import pytest

from app import cli
from app.launcher import models_venv as models_venv_module
from app.launcher.machine import ModelEnvironmentUnfit
from app.launcher.models_venv import ModelEnvironment
from deploy.python_mirror import write_mirror


@pytest.fixture(scope="module")
def mirror(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mirror(models_venv / "bin" / "python3", tmp_path_factory.mktemp("mirror"))


@pytest.fixture
def machine(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a Python for the models."""
    for name, version in (("numpy", "1.26.4"), ("nvidia-pytriton", "0.7.0"), ("pip", "25.0")):
        write_wheel(tmp_path / "wheels", name, version)
    variables = {
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(mirror),
        "UV_PYTHON_INSTALL_DIR": str(tmp_path / "pythons"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_DEFAULT_INDEX": (tmp_path / "empty index").as_uri(),
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "GATEWAY_EMBEDDED_VENV": "models-environment",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "configure_logging", lambda level, style: None)  # keeps pytest's logging
    monkeypatch.setattr(models_venv_module, "model_candidates", lambda _: [Path("/nonexistent")])
    monkeypatch.setattr(
        models_venv_module.Interpreter, "runs_models", property(lambda each: tmp_path in each.path.parents)
    )
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.usefixtures("machine")
def test_init_creates_the_environment_with_a_python_that_uv_installs(tmp_path: Path) -> None:
    assert cli.main(["init", "models"]) == 0
    made = ModelEnvironment.of(tmp_path / "models-environment")
    assert made.python.version in {(3, 11), (3, 12)}
    assert made.python.path.resolve().is_relative_to(tmp_path / "pythons")


def test_a_forbidden_download_is_one_message(
    machine: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.setenv("UV_PYTHON_DOWNLOADS", "never")
    assert cli.main(["init", "models"]) == 2
    message = capfd.readouterr().err
    assert "No Python on this machine can run the models: they need Python 3.10 to 3.12" in message
    assert "Python downloads are set to 'never'" in message
    assert not (tmp_path / "models-environment").exists()
    assert (tmp_path / "models" / "gateway.yaml").exists()


def test_an_incomplete_environment_is_removed(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "numpy-1.26.4-py3-none-any.whl").unlink()
    with pytest.raises(ModelEnvironmentUnfit, match="numpy"):
        models_venv_module.create(tmp_path / "models-environment")
    assert not (tmp_path / "models-environment").exists()


def test_a_gateway_that_can_run_models_needs_no_other_environment(models_venv: Path) -> None:
    assert not models_venv_module.is_needed(models_venv)


def test_a_gateway_without_uv_cannot_create_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert models_venv_module.is_needed(tmp_path)
    monkeypatch.setattr(models_venv_module.sysconfig, "get_path", lambda _: os.devnull)
    assert not models_venv_module.is_needed(tmp_path)
