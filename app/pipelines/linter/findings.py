"""The findings of the linter. Each has a stable code, with a page in docs/reference/checks."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    ERROR = "error"
    """Triton refuses to load it, or requests will fail or be lost."""
    WARNING = "warning"
    """It runs, and may hurt."""
    UNKNOWN = "unknown"
    """Cannot be judged from what is written down; never a fault."""


class Code(StrEnum):
    UNREADABLE_CONFIG = "unreadable-config"
    FOLDER_NAME = "folder-name"
    INVALID_SIZE = "invalid-size"
    EXCESSIVE_SIZE = "excessive-size"
    UNKNOWN_MODEL = "unknown-model"
    UNKNOWN_VERSION = "unknown-version"
    UNKNOWN_TENSOR = "unknown-tensor"
    UNMAPPED_INPUT = "unmapped-input"
    UNWRITTEN_TENSOR = "unwritten-tensor"
    UNREAD_TENSOR = "unread-tensor"
    WRITTEN_TWICE = "written-twice"
    CYCLE = "cycle"
    DATATYPE_MISMATCH = "datatype-mismatch"
    SHAPE_MISMATCH = "shape-mismatch"
    BATCH_MISMATCH = "batch-mismatch"
    DECOUPLED_JOIN = "decoupled-join"
    OMITTED_INPUT = "omitted-input"
    BLS_CYCLE = "bls-cycle"
    CANCEL_INSTANCES = "cancel-instances"
    GATEWAY_YAML = "gateway-yaml"
    ROUTER_NEEDED = "router-needed"
    UNORDERED_STREAM = "unordered-stream"
    MISSING_SCRIPT = "missing-script"
    SCRIPT_SYNTAX = "script-syntax"
    UNKNOWN_BACKEND = "unknown-backend"
    PARALLEL_FAILURE = "parallel-failure"
    SAMPLE = "sample"
    OTHER_SIGNATURE = "other-signature"
    NEEDS_SESSION = "needs-session"
    UNKNOWN_EDGE = "unknown-edge"


_WARNINGS = frozenset(
    {
        Code.EXCESSIVE_SIZE,
        Code.ROUTER_NEEDED,
        Code.UNORDERED_STREAM,
        Code.UNKNOWN_BACKEND,
        Code.PARALLEL_FAILURE,
        Code.NEEDS_SESSION,
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """``step`` counts from 1 within ``model``, an ensemble; it and ``tensor`` are None where they say nothing.

    ``pipeline``: for a finding in gateway.yaml, the pipeline that it is about.
    """

    code: Code
    text: str
    model: str | None = None
    step: int | None = None
    tensor: str | None = None
    pipeline: str | None = None

    @property
    def severity(self) -> Severity:
        if self.code is Code.UNKNOWN_EDGE:
            return Severity.UNKNOWN
        return Severity.WARNING if self.code in _WARNINGS else Severity.ERROR
