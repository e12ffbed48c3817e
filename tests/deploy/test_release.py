"""``make release``: the tag decides the version of every file, and links work outside of the repository.

The locked packages have no known vulnerability, except those with a reason and an expiry date.
"""

import datetime
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy import release
from deploy.bootstrap import ROOT
from tests.conftest import Require
from tests.toolkit.environments import locked_environment

URL = "https://git.example.com/team/triton-gateway"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with two tags: a release, and one that the changelog does not have."""
    clone = tmp_path_factory.mktemp("tagged") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", clone], check=True)
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## [Unreleased]", "## [9.8.7] - 2030-01-01"))
    author = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    for command in (("commit", "--quiet", "-am", "A release"), ("tag", "v9.8.7"), ("tag", "v9.9.9")):
        subprocess.run(["git", *author, *command], cwd=clone, check=True)
    return clone


@pytest.mark.full
def test_the_files_of_a_release_have_the_version_of_the_tag(tagged: Path, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    release.make("v9.8.7", URL, tagged, dist)
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "wheel")
        names = wheel.namelist()
    command = [sys.executable, "-m", "app.cli", "--version"]
    said = subprocess.run(command, cwd=tmp_path / "wheel", check=True, capture_output=True, text=True).stdout
    assert said.strip() == "9.8.7"
    folder = "triton_gateway-9.8.7.dist-info"
    assert {f"{folder}/licenses/{name}" for name in ("LICENSE", "NOTICE")} < {*names}
    assert "app/py.typed" in names
    metadata = message_from_string((tmp_path / "wheel" / folder / "METADATA").read_text())
    assert f"Repository, {URL}" in metadata.get_all("Project-URL", [])
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert f"{URL}/raw/v9.8.7/docs/images/console.png" in links
    assert all(link.startswith(("https://", "#")) for link in links)
    with tarfile.open(dist / "triton-gateway-9.8.7.tgz") as chart:
        described = yaml.safe_load(chart.extractfile("triton-gateway/Chart.yaml").read())
    assert (described["version"], described["appVersion"]) == ("9.8.7", "9.8.7")
    with tarfile.open(dist / "triton-gateway-site-9.8.7.tar.gz") as site:
        assert {f"app/site/{name[2:]}" for name in site.getnames() if name.endswith(".html")} < {*names}
    bom = json.loads((dist / "triton-gateway-9.8.7.cdx.json").read_text())
    locked = re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements" / "gateway.txt").read_text(), re.M)
    assert {(each["name"], each["version"]) for each in bom["components"]} == {*locked}
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    files = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in dist.iterdir()}
    assert sums == {name: found for name, found in files.items() if name != "SHA256SUMS"}


@pytest.mark.parametrize(
    ("tag", "said"), [("v9.8.8", "There is no tag v9.8.8"), ("v9.9.9", "CHANGELOG.md of v9.9.9 has no section [9.9.9]")]
)
def test_a_tag_that_cannot_be_released_is_refused(tagged: Path, tmp_path: Path, tag: str, said: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        release.make(tag, URL, tagged, tmp_path / "dist")


@pytest.mark.parametrize("arguments", [[], ["v1.2.3"], ["1.2.3", URL], ["v1.2.3rc1", URL], ["v1.2.3", "example"]])
def test_a_release_needs_a_tag_and_an_address(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release", *arguments])
    with pytest.raises(SystemExit, match="Name the tag and the address"):
        release.main()


ACCEPTED = ROOT / "requirements" / "advisories.toml"
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
NPM_LOCKS = sorted(
    path.parent
    for folder in ("requirements", "tests")
    for path in (ROOT / folder).rglob("package-lock.json")
    if "node_modules" not in path.parts
)
VULNERABLE = "https://pypi.org/pypi/jinja2/2.4.1/json"
"""A version with known vulnerabilities."""
NO_SERVICE = "PyPI's advisory service does not answer here: the locked packages are not audited"


def test_the_accepted_advisories_can_be_read() -> None:
    accepted_in(ACCEPTED.read_text())


def test_every_locked_package_has_a_hash() -> None:
    for lock in LOCKS:
        packages = [part for part in lock.read_text().split("\n") if "==" in part and not part.startswith(" ")]
        assert packages, lock.name
        assert all(part.endswith("\\") for part in packages), lock.name


@pytest.fixture(scope="module")
def pip_audit(require: Require) -> Path:
    require(service_answers(), NO_SERVICE)
    return locked_environment("audit", require) / "pip-audit"


def service_answers() -> bool:
    """Whether the service knows a version that is known to be vulnerable."""
    try:
        answer = httpx.get(VULNERABLE, timeout=20, follow_redirects=True)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and bool(answer.json().get("vulnerabilities"))


@pytest.mark.full
@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_no_locked_package_has_a_known_vulnerability(pip_audit: Path, lock: Path) -> None:
    options = ["--requirement", lock, "--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run([pip_audit, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    accepted = accepted_in(ACCEPTED.read_text())
    assert complaints(json.loads(done.stdout), accepted, datetime.datetime.now(datetime.UTC).date()) == []


@pytest.mark.full
@pytest.mark.parametrize("folder", NPM_LOCKS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_locked_npm_package_has_a_known_vulnerability(folder: Path, require: Require) -> None:
    require(shutil.which("npm"), "there is no npm")
    command = ["npm", "audit", "--package-lock-only", "--json", "--loglevel=error"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(done.stdout or "{}")
    require("vulnerabilities" in report, "npm's advisory service does not answer here: the lock is not audited")
    assert report["vulnerabilities"] == {}


@dataclass(frozen=True)
class Accepted:
    package: str
    reason: str
    expires: datetime.date


def accepted_in(text: str) -> dict[str, Accepted]:
    """Returns the entries by advisory id. Raises TypeError for an entry with missing or unknown keys."""
    return {advisory: Accepted(**entry) for advisory, entry in tomllib.loads(text).items()}


def complaints(report: Mapping[str, Any], accepted: Mapping[str, Accepted], today: datetime.date) -> list[str]:
    """Returns a line for each advisory that is not accepted and for each package that the service does not know.

    pip-audit itself exits with 0 if the service knows no package at all.
    """
    found = []
    for package in report["dependencies"]:
        if "skip_reason" in package:
            found.append(f"not audited: {package['skip_reason']}")
        for advisory in package.get("vulns", ()):
            ids = {advisory["id"], *advisory["aliases"]}
            if not any(is_accepted(accepted.get(each), package["name"], today) for each in ids):
                fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
                found.append(f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    return found


def is_accepted(entry: Accepted | None, package: str, today: datetime.date) -> bool:
    return entry is not None and entry.package == package and today < entry.expires
