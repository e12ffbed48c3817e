import subprocess
import tomllib

import pytest

from app.launcher.machine import ModelEnvironmentUnfit
from app.launcher.models_venv import PACKAGES, ModelEnvironment


@pytest.fixture
def venv(tmp_path, models_venv):
    """An environment with the models' interpreter and no packages."""
    python = models_venv / "bin" / "python3"
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv"


@pytest.fixture
def install(venv):
    """Adds metadata that makes a distribution look installed."""

    def install(name: str, version: str) -> None:
        (site_packages,) = venv.glob("lib/python3.*/site-packages")
        folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install


def test_the_environment_of_the_models_is_usable(models_venv):
    environment = ModelEnvironment.of(models_venv)
    assert environment.executable.is_file()
    assert environment.python.runs_models


def test_the_backend_is_linked_with_the_matching_stub(models_venv, tmp_path):
    ModelEnvironment.of(models_venv).link_backends(tmp_path / "backends")
    linked = {each.name: each.resolve() for each in (tmp_path / "backends" / "python").iterdir()}
    assert {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"} <= linked.keys()
    assert all(each.is_file() for each in linked.values())


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        ({"nvidia-pytriton": "0.7.0", "numpy": "2.1.3"}, r"numpy 2\.1\.3.*corrupts.*numpy<2"),
        ({"numpy": "1.26.4"}, "does not hold the wheel"),
        ({}, "has no numpy, and it does not hold the wheel"),
    ],
    ids=["numpy 2", "no wheel", "nothing"],
)
def test_an_incomplete_environment_is_an_error_with_its_remedy(venv, install, installed, text):
    for name, version in installed.items():
        install(name, version)
    with pytest.raises(ModelEnvironmentUnfit, match=text) as caught:
        ModelEnvironment.of(venv)
    assert f"Run `{venv}/bin/python3 -m pip install 'numpy<2' 'nvidia-pytriton==0.7.0'`." in str(caught.value)


def test_the_error_for_a_missing_environment_has_a_remedy(tmp_path):
    with pytest.raises(ModelEnvironmentUnfit, match=r"make run.*pip install '\.\[embedded\]'"):
        ModelEnvironment.of(tmp_path)


def test_a_python_without_a_stub_in_the_wheel_is_an_error(tmp_path):
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho '[[3, 13], \"/usr/lib\"]'\n")
    python.chmod(0o755)
    with pytest.raises(ModelEnvironmentUnfit, match=r"3\.10 to 3\.12"):
        ModelEnvironment.of(tmp_path)


def test_packages_match_the_extra_and_the_lock(pytestconfig):
    extra = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = extra["embedded"][0].partition(";")[0]
    assert f"'{wheel}'" in PACKAGES
    assert {wheel, "numpy<2"} <= set((pytestconfig.rootpath / "requirements" / "triton.in").read_text().splitlines())
