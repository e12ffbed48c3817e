"""The checks of the linter by the stable code of their findings.

``findings.yaml`` has the severity and the solution of each code, and docs/reference/checks.md a section.
"""

from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Literal, TypeVar

import msgspec
import yaml
from msgspec import Struct, field

from app.core.model import Finding

T = TypeVar("T")


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


Fact = Literal["ensemble", "forks", "bls", "decoupled", "several-instances"]


class ModelCondition(Struct, forbid_unknown_fields=True):
    """What a model must be or have. ``has`` and ``lacks``: paths in its configuration, as ``path`` or ``path=value``.

    ``steps``: each of at least one model that it runs as a step or calls.
    """

    is_: list[Fact] = field(default_factory=list, name="is")
    name: str = ""
    backend: str = ""
    has: list[str] = []
    lacks: list[str] = []
    steps: "list[ModelCondition]" = []


class KnownFault(Check, kw_only=True, forbid_unknown_fields=True):
    """A fault of Triton itself, as ``known_faults.yaml`` explains its members."""

    seen: str
    solution: str = ""
    reports: list[str]
    dated: str
    when: ModelCondition = field(default_factory=ModelCondition)
    fixed: str = ""
    kept: str = ""
    helps: str = ""
    example: dict[str, str] = {}
    neighbour: dict[str, str] = {}


class KnownFaults(Struct, forbid_unknown_fields=True):
    newest: str
    """The newest release of Triton that was read."""
    faults: dict[str, KnownFault]


@cache
def known_faults() -> KnownFaults:
    return _declared("known_faults.yaml", KnownFaults)


@cache
def checks() -> dict[str, Check]:
    """By code: what ``findings.yaml`` declares, and the known faults of Triton."""
    return {**_declared("findings.yaml", dict[str, Check]), **known_faults().faults}


def _declared(name: str, type_: type[T]) -> T:
    return msgspec.convert(yaml.safe_load(files("app.lint").joinpath(name).read_text("utf-8")), type_)


def check_of(finding: Finding) -> Check:
    return checks()[finding.code]


def page_of(finding: Finding) -> str:
    return "known-faults" if finding.code in known_faults().faults else "checks"
