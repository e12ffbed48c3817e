"""The checks of the linter by the stable code of their findings.

``findings.yaml`` has the severity and the solution of each code, and docs/reference/checks.md a section.
"""

from enum import StrEnum
from functools import cache
from importlib.resources import files

import msgspec
import yaml
from msgspec import Struct

from app.core.model import Finding


class Severity(StrEnum):
    ERROR = "error"
    """Triton refuses to load it, or requests will fail or be lost."""
    WARNING = "warning"
    """It runs, and may hurt."""
    HINT = "hint"
    """It runs, and might run faster; never a fault."""
    UNKNOWN = "unknown"
    """Cannot be judged from what is written down; never a fault."""


WAYS_TO_JOIN_REQUESTS = "`dynamic_batching` would join requests in Triton, `coalesce` would join them in the gateway"


class Check(Struct, forbid_unknown_fields=True):
    severity: Severity
    solution: str


@cache
def checks() -> dict[str, Check]:
    """By code: what ``findings.yaml`` declares."""
    text = files("app.lint").joinpath("findings.yaml").read_text("utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, Check])


def check_of(finding: Finding) -> Check:
    return checks()[finding.code]
