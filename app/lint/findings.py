"""The findings of the linter. A finding has a stable code.

``findings.yaml`` has the severity and the solution of each code, and docs/reference/checks.md a section.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

import msgspec
import yaml
from msgspec import Struct


class Severity(StrEnum):
    ERROR = "error"
    """Triton refuses to load it, or requests will fail or be lost."""
    WARNING = "warning"
    """It runs, and may hurt."""
    HINT = "hint"
    """It runs, and might run faster; never a fault."""
    UNKNOWN = "unknown"
    """Cannot be judged from what is written down; never a fault."""


class Code(StrEnum):
    UNREADABLE_CONFIG = "unreadable-config"
    DUPLICATE_KEY = "duplicate-key"
    FOLDER_NAME = "folder-name"
    MISSING_FILE = "missing-file"
    INVALID_SIZE = "invalid-size"
    INVALID_TENSOR = "invalid-tensor"
    INVALID_BATCHING = "invalid-batching"
    INVALID_SEQUENCE = "invalid-sequence"
    INVALID_ENSEMBLE = "invalid-ensemble"
    INVALID_SETTING = "invalid-setting"
    INVALID_WARMUP = "invalid-warmup"
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
    OVERWRITTEN_VALUE = "overwritten-value"
    PARALLEL_FAILURE = "parallel-failure"
    SAMPLE = "sample"
    OTHER_SIGNATURE = "other-signature"
    COALESCING = "coalescing"
    NEEDS_SESSION = "needs-session"
    SESSION_IDLE = "session-idle"
    SESSION_PLACES = "session-places"
    SESSION_STATE = "session-state"
    PRESET_MISMATCH = "preset-mismatch"
    NOT_DECOUPLED = "not-decoupled"
    SPLIT_CHARACTERS = "split-characters"
    NO_HEALTH_CHECK = "no-health-check"
    SPECIAL_TOKENS = "special-tokens"
    BATCHES_OF_ONE = "batches-of-one"
    UNKNOWN_EDGE = "unknown-edge"


WAYS_TO_JOIN_REQUESTS = "`dynamic_batching` would join requests in Triton, `coalesce` would join them in the gateway"


class Check(Struct, forbid_unknown_fields=True):
    severity: Severity
    solution: str


@cache
def checks() -> dict[Code, Check]:
    text = files("app.lint").joinpath("findings.yaml").read_text("utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[Code, Check])


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
        return checks()[self.code].severity

    @property
    def solution(self) -> str:
        return checks()[self.code].solution
