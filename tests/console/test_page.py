"""The page loads only its own files, its policy blocks everything else, and its libraries are the locked ones."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp

from app.api.openapi import CONSOLE, pages_of_docs
from app.api.openapi import PAGE_HEADERS as HEADERS
from app.routes import create_app
from app.settings import Settings
from deploy.console_libraries import LOCK, VENDOR, copy, installed, readme
from tests.conftest import Require
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import connected
from tests.toolkit.gateway import Served, served

FOLDERS = [Path(folder) for folder in CONSOLE.all_directories]
"""The console's own folder, and that of the files that all pages share."""
FILES = sorted(path.name for folder in FOLDERS for path in folder.iterdir() if path.is_file())
MODULES = [name for name in FILES if name.endswith(".js")]
COMMENTS = {"https://github.com/leeoniya/uPlot"}
LIBRARIES = sorted(
    f"vendor/{path.name}" for path in (FOLDERS[0] / "vendor").iterdir() if path.suffix in {".js", ".css"}
)
NAMED = re.compile(r"""(?:from |import\()"\./([^"]+)"|/console/([^"]+)""")


def path_of(name: str) -> Path:
    (found,) = (folder / name for folder in FOLDERS if (folder / name).is_file())
    return found


def read(name: str) -> str:
    return path_of(name).read_text()


@pytest.fixture
async def gateway() -> AsyncIterator[Served]:
    async with served(FakeEngine({})) as found:
        yield found


async def fetched(app: ASGIApp, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(connected(app)), base_url="http://gateway") as client:
        return await client.get(path)


async def test_the_page_is_at_the_root(gateway: Served) -> None:
    answer = await gateway.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("may_load", [False, True])
async def test_the_page_is_told_whether_it_may_send_load(gateway: Served, may_load: bool) -> None:
    gateway.gateway.settings = Settings(console_load=may_load)
    answer = await gateway.client.get("/console/settings")
    assert answer.json() == {"may_load": may_load}


async def test_every_file_of_the_page_has_the_same_policy(gateway: Served) -> None:
    named = {own or path for name in ["index.html", *MODULES] for own, path in NAMED.findall(read(name))}
    assert set(FILES) - named == {"index.html"}, "a file that nothing names"
    for path in {*named, *LIBRARIES}:
        answer = await gateway.client.get(f"/console/{path}")
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", [*FILES, *LIBRARIES])
def test_the_page_loads_only_its_own_files(name: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", read(name)))
    assert (
        addresses <= {f"http://www.w3.org/{name}" for name in ("2000/svg", "1999/xhtml", "1998/Math/MathML")} | COMMENTS
    )


def test_the_page_has_no_inline_script_or_style() -> None:
    html = read("index.html")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", html)


@pytest.mark.parametrize("name", MODULES)
def test_no_module_makes_markup_from_text(name: str) -> None:
    assert not re.search(
        r"innerHTML|dangerouslySetInnerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
        read(name),
    )


async def test_without_the_console_the_root_leads_to_the_documentation(gateway: Served) -> None:
    answer = await fetched(create_app(replace(gateway.gateway, settings=Settings(console=False)), admin_port=8081), "/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")


async def test_without_a_built_site_the_documentation_is_the_page_of_the_api(tmp_path: Path) -> None:
    answer = await fetched(Starlette(routes=pages_of_docs(tmp_path / "none")), "/docs/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")


async def test_without_console_and_docs_the_root_is_404(gateway: Served) -> None:
    app = create_app(replace(gateway.gateway, settings=Settings(docs=False, console=False)), admin_port=8081)
    assert [(await fetched(app, path)).status_code for path in ("/", "/console/console.js")] == [404, 404]


def test_the_wheel_carries_the_files(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=pytestconfig.rootpath, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {str(path_of(name).relative_to(pytestconfig.rootpath)) for name in [*FILES, *LIBRARIES]} <= names
    assert {f"app/api/static/{name}" for name in ("docs.html", "docs.js", "docs.css", "page.css")} <= names


LIMIT_BYTES = 80_000
IMPORTED = re.compile(r'(?:from |import\()"\./([^"]+)"|"/console/([^"]+)"')
OPENED = {"operation.js", "details.js", "load.js", "waterfall.js", "chat.js", "speak.js"}
SETTINGS = {"settings"}
"""An address of the API, which is no file."""


def test_the_table_has_the_hash_and_version_of_each_copy() -> None:
    assert (VENDOR / "README.md").read_text() == readme(VENDOR), "run `make vendor`"


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
    """Without the sections that a user opens."""
    loaded, left = set[str](), {"index.html"}
    while left:
        loaded |= left
        named = [match for name in left for match in IMPORTED.findall(read(name))]
        left = {own or path for own, path in named} - loaded - OPENED - SETTINGS
    assert {"colours.css", "console.css", "workbench.js", "vendor/preact.js", "vendor/uplot.css"} <= loaded
    assert sum(len(gzip.compress(path_of(name).read_bytes(), mtime=0)) for name in loaded) <= LIMIT_BYTES
