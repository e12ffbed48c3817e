"""``/docs`` and the error pages work without internet access."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from app.api.error_table import ERROR_BY_CODE
from tests.conftest import Require
from tests.live.conftest import GatewayProcess
from tests.toolkit.short_paths import short_path

PAGES = ["/docs", "/docs/errors", *(f"/docs/errors/{code}" for code in ERROR_BY_CODE)]
REFERENCE = re.compile(r"""(?:src|href)\s*=\s*["']([^"']*)["']|url\(["']?([^"')]*)""")


def references_in(text: str) -> set[str]:
    """Returns the addresses that a browser loads for a page or a style sheet, without data URLs."""
    found = {source or url for source, url in REFERENCE.findall(text)}
    return {reference for reference in found if not reference.startswith(("data:", "#"))}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_refers_only_to_this_gateway(page: str, client: httpx.Client) -> None:
    answer = client.get(page)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    for reference in references_in(answer.text):
        assert re.match(r"/(?!/)", reference), f"{page} refers to {reference}"
        assert client.get(reference).status_code == 200


def test_the_style_sheet_has_no_external_references(client: httpx.Client) -> None:
    assert references_in(client.get("/docs/assets/swagger-ui.css").text) == set()


def test_a_browser_without_the_internet_shows_every_pipeline(
    gateway: GatewayProcess, client: httpx.Client, require: Require, tmp_path: Path
) -> None:
    chromium = shutil.which("chromium-headless-shell")
    require(chromium, "there is no Chromium: `make system-packages` installs it")
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with short_path(tmp_path) as temporary:
        page = subprocess.run(
            [str(chromium), *options, offline, "--virtual-time-budget=10000", "--dump-dom", f"{gateway.url}/docs"],
            env=os.environ | {"TMPDIR": str(temporary)},
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout
    paths = client.get("/openapi.json").json()["paths"]
    assert set(re.findall(r'data-path="([^"]*)"', page)) == set(paths)
