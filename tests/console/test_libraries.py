"""The copies of the console's libraries are those of the locked npm packages."""

import gzip
import json
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from deploy.console_libraries import FILES, LOCK, PURPOSES, VENDOR, copy, installed, readme
from tests.conftest import Require
from tests.console.files import path_of, read

LIMIT_BYTES = 80_000
NAMED = re.compile(r'(?:from |import\()"\./([^"]+)"|"/console/([^"]+)"')
OPENED = {"live-panel.js", "findings.js", "load.js", "waterfall.js", "chat.js", "speak.js"}
SETTINGS = {"settings"}
"""An address of the API, which is no file."""


def test_the_table_has_the_hash_and_version_of_each_copy() -> None:
    assert (VENDOR / "README.md").read_text() == readme(VENDOR), "run `make vendor`"


def test_there_are_no_other_files() -> None:
    licences = {f"{package.rpartition('/')[2]}.LICENSE" for package in PURPOSES}
    assert {path.name for path in VENDOR.iterdir()} == {"README.md", *FILES, *licences}


def test_the_lock_names_exact_versions_and_no_host() -> None:
    named = json.loads((LOCK / "package.json").read_text())["dependencies"]
    text = (LOCK / "package-lock.json").read_text()
    packages = json.loads(text)["packages"]
    assert "resolved" not in text
    assert {name: packages[f"node_modules/{name}"]["version"] for name in named} == named
    assert all("integrity" in entry for name, entry in packages.items() if name)


def test_the_copies_are_those_of_the_locked_packages(tmp_path: Path, require: Require) -> None:
    require(shutil.which("npm"), "there is no npm")
    try:
        modules = installed()
    except subprocess.CalledProcessError:
        require(False, "npm installs nothing here")
    copy(modules, tmp_path)
    assert contents(tmp_path) == contents(VENDOR)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_page_loads_at_most_80_kb() -> None:
    loaded = loaded_by("index.html")
    assert {"colours.css", "console.css", "workbench.js", "vendor/preact.js", "vendor/uplot.css"} <= loaded
    assert sum(len(gzip.compress(path_of(name).read_bytes(), mtime=0)) for name in loaded) <= LIMIT_BYTES


def loaded_by(*names: str) -> set[str]:
    """The files that the page loads, without the sections that a user opens."""
    found: set[str] = set()
    left = set(names)
    while left:
        found |= left
        named = [match for name in left for match in NAMED.findall(read(name))]
        left = {own or path for own, path in named} - found - OPENED - SETTINGS
    return found
