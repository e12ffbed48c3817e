"""The setup installs a Python with the real uv, from a local mirror of uv's address."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from app.launcher import machine
from deploy.python_mirror import write_mirror
from tests.toolkit.http_server import served


@pytest.fixture(scope="module")
def folder(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    write_mirror(models_venv / "bin" / "python3", folder)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of ``folder`` on an HTTP server."""
    with served(folder) as origin:
        yield origin


@pytest.fixture
def downloads(folder: Path, address: str, tmp_path: Path) -> Path:
    """The list of downloads, with the addresses of the HTTP server."""
    text = (folder / "downloads.json").read_text()
    listed = tmp_path / "downloads.json"
    listed.write_text(text.replace(folder.as_uri(), address))
    return listed


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


def test_the_gateway_gets_the_same_python(setup: ModuleType) -> None:
    assert setup.find_gateway_python().version in {(3, 11), (3, 12)}
    assert setup.find_gateway_python() == setup.find_models_python()


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
