"""Reads the findings of pip-audit for a lock file; some advisories are accepted for a limited time."""

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ACCEPTED = ROOT / "requirements" / "advisories.toml"


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
