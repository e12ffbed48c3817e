"""The setup of a checkout: its environments, its Python, and the commands of README in a fresh Debian.

The setup installs a Python with the real uv, from a local mirror of uv's address.
"""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from app.launcher import machine
from deploy.python_mirror import write_mirror
from tests.conftest import Require
from tests.toolkit.http_server import served
from tests.toolkit.programs import output_of


@pytest.fixture(scope="module")
def bootstrap(pytestconfig: pytest.Config) -> Iterator[ModuleType]:
    """``deploy/bootstrap.py`` as a module of its own."""
    spec = importlib.util.spec_from_file_location("bootstrap", pytestconfig.rootpath / "deploy" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, "bootstrap", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def environment(bootstrap, tmp_path):
    """A complete environment."""
    lock = tmp_path / "lock.txt"
    lock.write_text("numpy==1.26.4\n")
    made = bootstrap.Environment(tmp_path / ".venv", (lock,), ())
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    made.stamp.write_text(made.fingerprint())
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.locks[0].write_text("numpy==1.26.3\n"),
        lambda made: made.stamp.unlink(),
        lambda made: made.python.unlink(),
        lambda made: replace(made, chosen="/opt/python3.12"),
        lambda made: replace(made, folder=made.folder.rename(made.folder.with_name("moved"))),
    ],
    ids=["changed lock", "incomplete", "no interpreter", "another interpreter", "moved"],
)
def test_a_changed_environment_is_stale(environment, change):
    assert environment.is_current()
    changed = change(environment)
    assert not (changed if isinstance(changed, type(environment)) else environment).is_current()


def test_the_stamp_is_written_last(bootstrap, environment, monkeypatch):
    monkeypatch.setattr(bootstrap, "is_whole", lambda *_: True)
    python = bootstrap.Interpreter(environment.python, (3, 11), "")
    with pytest.raises(KeyboardInterrupt), bootstrap.being_made(environment, python):
        raise KeyboardInterrupt
    assert not environment.is_current()
    with bootstrap.being_made(environment, python):
        pass
    assert environment.is_current()


def test_an_unsupported_machine_stops_setup_with_a_reason(bootstrap, monkeypatch):
    unfit = bootstrap.machine.Machine("Darwin", "arm64", None, False)
    monkeypatch.setattr(bootstrap.machine.Machine, "here", lambda: unfit)
    with pytest.raises(SystemExit, match="needs Linux, this is Darwin"):
        bootstrap.require_fit_machine()


def test_an_unfit_chosen_python_stops_setup(bootstrap, monkeypatch):
    chosen = replace(bootstrap.MODELS, chosen="/nonexistent/python3.12")
    monkeypatch.setattr(bootstrap, "MODELS", chosen)
    with pytest.raises(SystemExit, match=r"/nonexistent/python3\.12 cannot run the models"):
        bootstrap.find_models_python()


def test_setup_uses_tools_outside_and_folders_inside_of_the_checkout(bootstrap, monkeypatch):
    monkeypatch.setenv("PATH", f"{bootstrap.ROOT}/.venv/bin:/usr/bin")
    assert bootstrap.outside_checkout()["PATH"] == "/usr/bin"
    for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "TMPDIR"):
        assert bootstrap.TOOL_ENVIRONMENT[name].startswith(str(bootstrap.ROOT))


def test_the_error_names_the_failed_command(bootstrap):
    with pytest.raises(SystemExit, match=r"(?s)status 1.*/bin/false"):
        bootstrap.run("/bin/false")


@pytest.fixture(scope="module")
def folder(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    write_mirror(models_venv / "bin" / "python3", folder)
    return folder


@pytest.fixture
def downloads(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """The list of downloads, with the addresses of an HTTP server of ``folder``."""
    text = (folder / "downloads.json").read_text()
    listed = tmp_path / "downloads.json"
    with served(folder) as origin:
        listed.write_text(text.replace(folder.as_uri(), origin))
        yield listed


@pytest.fixture
def setup(bootstrap: ModuleType, downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The setup on a machine whose only Python is 3.15."""
    python = tmp_path / "python3.15"
    python.write_text("#!/bin/sh\necho '[[3, 15], null]'\n")
    python.chmod(0o755)
    monkeypatch.setattr(machine, "candidates", lambda *_: [python])
    make_apt(tmp_path, "", monkeypatch)
    monkeypatch.setattr(bootstrap, "MANAGED_PYTHONS", bootstrap.CACHE / "tmp" / tmp_path.name)
    use(bootstrap, monkeypatch, UV_PYTHON_DOWNLOADS_JSON_URL=str(downloads))
    return bootstrap


def make_apt(folder: Path, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own apt takes a second to answer."""
    apt = folder / "apt-cache"
    apt.write_text(f"#!/bin/sh\necho '{known}'\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def use(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setitem(bootstrap.ENVIRONMENT, name, value)
        monkeypatch.setenv(name, value)


def test_without_a_fitting_python_one_is_installed(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = setup.find_models_python()
    assert found.runs_models
    assert found.path.is_relative_to(setup.MANAGED_PYTHONS)
    use(setup, monkeypatch, UV_PYTHON_DOWNLOADS="never")
    assert setup.find_models_python() == found
    assert machine.inspect(found.path) == found
    assert found.version in {(3, 11), (3, 12)}
    assert setup.find_gateway_python() == found


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"UV_PYTHON_DOWNLOADS": "never"}, "because UV_PYTHON_DOWNLOADS=never is set"),
        ({"UV_OFFLINE": "1"}, "because UV_OFFLINE is set"),
    ],
    ids=["never", "offline"],
)
def test_a_forbidden_download_is_one_message(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    use(setup, monkeypatch, **variables)
    monkeypatch.setattr(setup, "UV", Path("/nonexistent"))
    with pytest.raises(SystemExit, match=reason) as caught:
        setup.find_models_python()
    assert str(caught.value).startswith("No Python on this machine can run the models: they need Python 3.10 to 3.12")
    with pytest.raises(SystemExit, match=rf"(?s)can run the gateway: it needs Python 3\.11 to 3\.14.*{reason}"):
        setup.find_gateway_python()


def test_an_unreachable_address_is_one_message(
    setup: ModuleType, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads.write_text(downloads.read_text().replace("http://127.0.0.1:", "http://127.0.0.1:1/"))
    use(setup, monkeypatch, UV_HTTP_RETRIES="0")
    with pytest.raises(SystemExit, match=r"(?s)MODELS_PYTHON=.*UV_PYTHON_INSTALL_MIRROR.*Failed to download"):
        setup.find_models_python()


def test_a_changed_archive_is_rejected(setup: ModuleType, downloads: Path) -> None:
    listed = json.loads(downloads.read_text())
    for each in listed.values():
        each["sha256"] = "0" * 64
    downloads.write_text(json.dumps(listed))
    with pytest.raises(SystemExit, match="Hash mismatch"):
        setup.find_models_python()


@pytest.mark.parametrize(
    ("known", "advice"),
    [
        ("Package: python3", None),
        ("Package: libpython3.11", "`apt-get install python3.11 libpython3.11`, or with pyenv"),
        ("Package: libpython3.10\nPackage: libpython3.12", "`apt-get install python3.12 libpython3.12`, or with pyenv"),
    ],
    ids=["debian-13", "debian-12", "ubuntu"],
)
def test_the_message_has_the_packages_that_this_system_has(
    known: str, advice: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apt(tmp_path, known, monkeypatch)
    message = machine.refusal(None)
    assert advice in message if advice else "apt-get" not in message
    assert "pyenv install 3.12" in message


def test_a_machine_without_ensurepip_gets_advice(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "can_make_environments", lambda _: False)
    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        bootstrap.find_gateway_python()


ADVICE = [
    ("bookworm", "To install one: `apt-get install python3.11 libpython3.11`, or with pyenv"),
    ("trixie", "To install one: with pyenv"),
    ("testing", "To install one: with pyenv"),
]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("suite", "advice"), ADVICE)
def test_the_commands_of_the_readme_work(
    suite: str, advice: str, require: Require, pytestconfig: pytest.Config
) -> None:
    require(os.geteuid() == 0, "debootstrap and chroot need root")
    require(shutil.which("debootstrap"), "there is no debootstrap: `make system-packages` installs it")
    printed = output_of([sys.executable, "deploy/fresh_debian.py", suite], pytestconfig.rootpath, within_s=3600)
    assert advice in printed
    assert "The setup does not install one, because UV_PYTHON_DOWNLOADS=never is set." in printed
