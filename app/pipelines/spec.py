"""What ``gateway.yaml`` may say, as types; every default that users see stands here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Kind = Literal["number", "text", "json", "image", "binary"]
Join = Literal["concatenate", "list", "last"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
GrpcCode = Literal[
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
    "any",
]

RESERVED_NAMES = frozenset({"early_exit"})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputSpec(_Section):
    tensor: str
    kind: Kind = "number"
    optional: bool = False
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    enum: list[Any] | None = None


class OutputSpec(_Section):
    tensor: str
    kind: Kind = "number"
    join: Join | None = None


class ParameterSpec(_Section):
    type: Literal["integer", "number", "string", "boolean"]
    minimum: float | None = None
    maximum: float | None = None
    enum: list[Any] | None = None
    default: bool | int | float | str | None = None
    optional: bool = False
    tensor: str | None = None


class StreamSpec(_Section):
    progress_s: Seconds = 30.0
    """The longest silence of the model."""
    timeout_s: Seconds = 600.0
    resume_s: Seconds = 60.0
    """How long a resumable stream goes on, and is kept, without a reader."""
    commit_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long a failure before the first output is still an ordinary HTTP error."""


class ErrorMatch(_Section):
    """Exactly one of ``message`` (the whole text), ``message_pattern`` (an anchored expression) and ``signed``."""

    code: GrpcCode
    message: str | None = None
    message_pattern: str | None = None
    signed: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> "ErrorMatch":
        if sum((self.message is not None, self.message_pattern is not None, self.signed)) != 1:
            raise ValueError("needs exactly one of message, message_pattern and signed")
        return self


class EarlyExitRule(_Section):
    reason: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    error: ErrorMatch | None = None
    missing: list[str] | None = None
    empty: list[str] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "EarlyExitRule":
        if sum(rule is not None for rule in (self.error, self.missing, self.empty)) != 1:
            raise ValueError("needs exactly one of error, missing and empty")
        return self


class ContractSpec(_Section):
    max_items: int | str | None = None
    """A number, or the name of a parameter whose value in the request is the number."""
    shape: list[int] | None = None
    not_growing: bool = False


class CancelSpec(_Section):
    model: str
    input: str


class PipelineSpec(_Section):
    model: str
    version: str = ""
    description: str = ""
    inputs: dict[Name, InputSpec] | None = None
    outputs: dict[Name, OutputSpec] | None = None
    parameters: dict[Name, ParameterSpec] = {}
    early_exit: list[EarlyExitRule] = []
    stream: StreamSpec | None = None
    contract: dict[str, ContractSpec] = {}
    cancel: CancelSpec | None = None
    timeout_s: Seconds | None = None
    """Left out: ``GATEWAY_TIMEOUT_S``."""
    idempotent: bool = False
    readiness: Literal["required", "optional"] = "required"
    rejects_input: list[str] = []
    warmup: bool = True
    batch: bool = False
    sample: dict[str, Any] | None = None

    @field_validator("stream", mode="before")
    @classmethod
    def _stream_with_defaults(cls, value: Any) -> Any:
        """``stream: true`` and ``stream:`` mean the defaults."""
        return {} if value is True else value

    @model_validator(mode="after")
    def _names_are_free(self) -> "PipelineSpec":
        outputs, parameters, inputs = (set(names or ()) for names in (self.outputs, self.parameters, self.inputs))
        if reserved := (outputs | parameters | inputs) & RESERVED_NAMES:
            raise ValueError(f"the name '{reserved.pop()}' is reserved")
        if twice := inputs & parameters:
            raise ValueError(f"the name '{twice.pop()}' is used for an input and a parameter")
        return self


class GatewaySpec(_Section):
    pipelines: dict[Name, PipelineSpec]
