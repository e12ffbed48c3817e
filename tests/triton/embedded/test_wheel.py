import subprocess
import tomllib

import pytest

from app.triton.embedded.errors import ModelEnvironmentUnfit
from app.triton.embedded.wheel import PACKAGES, ModelEnvironment


@pytest.fixture
def venv(tmp_path, models_venv):
    """An environment with the models' interpreter and no packages."""
    python = models_venv / "bin" / "python3"
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv"


@pytest.fixture
def pretend(venv):
    """Make a distribution look installed."""

    def pretend(name: str, version: str) -> None:
        (site_packages,) = venv.glob("lib/python3.*/site-packages")
        folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return pretend


def test_environment_of_the_models_is_fit(models_venv):
    environment = ModelEnvironment.of(models_venv)
    assert environment.executable.is_file()
    assert environment.python.runs_models


def test_backend_is_linked_with_the_stub_of_the_interpreter(models_venv, tmp_path):
    ModelEnvironment.of(models_venv).link_backends(tmp_path / "backends")
    linked = {each.name: each.resolve() for each in (tmp_path / "backends" / "python").iterdir()}
    assert {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"} <= linked.keys()
    assert all(each.is_file() for each in linked.values())


def test_numpy_2_is_refused(venv, pretend):
    pretend("nvidia-pytriton", "0.7.0")
    pretend("numpy", "2.1.3")
    with pytest.raises(ModelEnvironmentUnfit, match=r"numpy 2\.1\.3.*corrupts.*numpy<2"):
        ModelEnvironment.of(venv)


def test_missing_numpy_is_refused(venv):
    with pytest.raises(ModelEnvironmentUnfit, match="has no numpy, and it does not hold the wheel") as caught:
        ModelEnvironment.of(venv)
    assert f"Run `{venv}/bin/python3 -m pip install 'numpy<2' 'nvidia-pytriton==0.7.0'`." in str(caught.value)


def test_missing_wheel_is_refused(venv, pretend):
    pretend("numpy", "1.26.4")
    with pytest.raises(ModelEnvironmentUnfit, match="does not hold the wheel"):
        ModelEnvironment.of(venv)


def test_missing_environment_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ModelEnvironmentUnfit, match=r"make run.*pip install '\.\[embedded\]'"):
        ModelEnvironment.of(tmp_path)


def test_python_that_the_wheel_has_no_stub_for_is_refused(tmp_path):
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho '[[3, 13], \"/usr/lib\"]'\n")
    python.chmod(0o755)
    with pytest.raises(ModelEnvironmentUnfit, match=r"3\.10 to 3\.12"):
        ModelEnvironment.of(tmp_path)


def test_the_packages_are_those_of_the_extra_and_of_the_lock(pytestconfig):
    extra = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = extra["embedded"][0].partition(";")[0]
    assert f"'{wheel}'" in PACKAGES
    assert {wheel, "numpy<2"} <= set((pytestconfig.rootpath / "requirements" / "triton.in").read_text().splitlines())
