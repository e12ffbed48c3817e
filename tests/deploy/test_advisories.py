"""The locked packages have no known vulnerability, except those with a reason and an expiry date."""

import datetime
import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Require
from tests.toolkit.environments import locked_environment

ROOT = Path(__file__).parents[2]
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
