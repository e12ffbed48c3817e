"""Defines every error of the gateway, and the parsed form of Triton's errors about the steps of an ensemble.

``app/api/errors.yaml`` has the HTTP status and the remedy of each error.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from app.core.text import shown


class FaultKind(StrEnum):
    NOT_GIVEN = "not_given"
    """A step did not receive a required input, because the previous step did not write that tensor."""
    SHAPE = "shape"
    DATATYPE = "datatype"
    ITEMS = "items"
    """A step received more items than its contract allows, and reported it itself (model_kit.contract)."""
    NO_ROWS = "no_rows"
    """A step received a batch without rows, which Triton does not run."""
    MANY_ROWS = "many_rows"
    """A step received more rows than its ``max_batch_size``. Triton does not name the tensor."""
    SPLIT = "split"
    """A backend could not split an output into the requests of its batch."""
    RESPONSE_COUNT = "response_count"
    """A script returned a different number of responses than it received requests."""
    RETURNED_DECOUPLED = "returned_decoupled"
    """The script of a decoupled model returned responses instead of sending them."""
    DEADLOCK = "deadlock"
    """An output of an ensemble was never set."""
    CHILD_DECOUPLED = "child_decoupled"
    """A BLS script called a decoupled model as if it had one response."""
    CHILD_NOT_READY = "child_not_ready"
    RAISED = "raised"
    """A script raised: Triton fails every request of its batch with the same text."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The parsed form of Triton's errors about the steps of an ensemble.

    The names come from a text that a model, or a caller through a model, may have written, so they cannot be trusted.
    The gateway shows only names that the pipeline's graph contains.

    ``ensemble`` is the innermost ensemble in the text; ``expected`` and ``seen`` are shapes or datatypes. For
    ``ITEMS`` and ``MANY_ROWS``, ``expected`` is a number.
    """

    kind: FaultKind
    ensemble: str = ""
    model: str = ""
    tensor: str = ""
    expected: str = ""
    seen: str = ""


NO_TENSOR = "-"
"""Used if the tensor that violated its contract is unknown."""


class Outcome(StrEnum):
    """The outcome of a request. Metrics and the log use only these values."""

    OK = "ok"
    EARLY_EXIT = "early_exit"
    CLIENT_ERROR = "client_error"
    REJECTED = "rejected"
    MODEL_ERROR = "model_error"
    CONTRACT_VIOLATION = "contract_violation"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """A problem of one field of the request; ``problem`` never contains the value."""

    field: str
    problem: str


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """Triton's error, for early-exit rules and the log, but never for the caller.

    ``grpc_code`` is None for an error inside a stream, because Triton sends no code there.
    """

    grpc_code: str | None
    message: str


class Unusable(Exception):
    """A setting, a file, a port or a server cannot be used. The message is for the user at the terminal."""


class GatewayError(Exception):
    """The base class of the errors of requests.

    Callers see ``detail`` and ``hint``: they never contain values of the request, and names only as ``shown`` returns
    them. A model's message is part of them only if the operator exposes it.
    """

    code: ClassVar[str] = ""
    """Of a class: its own, or its name in lower case."""
    title: ClassVar[str] = ""
    outcome: ClassVar[Outcome] = Outcome.INTERNAL
    retryable: ClassVar[bool] = False
    retry_after_s: int | None = None
    """Whole seconds. A class's own value is for errors that do not know better."""

    def __init_subclass__(cls, *, code: str = "", title: str = "", outcome: Outcome | None = None) -> None:
        own_code = code or re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.code, cls.title, cls.outcome = own_code if title else "", title, outcome or cls.outcome

    def __init__(
        self,
        detail: str,
        *,
        hint: str | None = None,
        errors: Sequence[FieldProblem] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.retry_after_s = self.retry_after_s if retry_after_s is None else retry_after_s
        self.detail = detail
        self.hint = hint
        self.errors = tuple(errors)
        self.upstream: UpstreamError | None = None
        self.fault: Fault | None = None
        self.failed_step = ""
        """The model of the pipeline that failed, if the error names one."""

    def forget_frames(self) -> None:
        """Frees the frames of its traceback and of its causes', which hold a request's body or a model's response."""
        chain: list[BaseException | None] = [self]
        while chain:
            if (each := chain.pop()) is not None:
                chain += [each.__cause__, each.__context__]
                each.__traceback__ = each.__cause__ = each.__context__ = None


class ClientError(GatewayError, outcome=Outcome.CLIENT_ERROR): ...


class InvalidJson(ClientError, title="The body is not JSON"): ...


class InvalidRequest(ClientError, title="The request is malformed"): ...


class InvalidInput(ClientError, title="The input does not fit the pipeline"): ...


class ContextLengthExceeded(ClientError, title="The request is longer than the model's context"): ...


class Unauthenticated(ClientError, title="The API key is missing or not valid"): ...


class Forbidden(ClientError, title="Not allowed"): ...


class UnknownPipeline(ClientError, title="No such pipeline"): ...


class UnknownExample(ClientError, title="No such example"): ...


class UnknownModel(ClientError, title="No such model"):
    @classmethod
    def named(cls, model: str, version: str = "") -> "UnknownModel":
        """Has Triton's words."""
        of_version = f" version {shown(version)}" if version else ""
        return cls(f"Request for unknown model: '{shown(model)}'{of_version} is not found")


class NotFound(ClientError, title="No such address"): ...


class MethodNotAllowed(ClientError, title="The method is not allowed here"): ...


class UpgradeRequired(ClientError, title="The address needs a WebSocket"): ...


class SlowRequest(ClientError, title="The request came too slowly"):
    retryable = True


class PayloadTooLarge(ClientError, title="The body is too large"): ...


class UnsupportedMediaType(ClientError, title="The content type is not accepted"): ...


class HeadersTooLarge(ClientError, title="The headers are too large"): ...


class UnknownStream(ClientError, title="No such stream"): ...


class UnknownRequest(ClientError, title="No such request"): ...


class StreamEvicted(ClientError, title="The events are gone"): ...


class ResumableStreamsOff(ClientError, title="Resumable streams are off"): ...


class Rejected(GatewayError, outcome=Outcome.REJECTED):
    retryable = True
    retry_after_s = 1


class TooManyRequests(Rejected, title="Too many requests"): ...


class Draining(Rejected, title="The gateway is shutting down"): ...


class ModelError(GatewayError, title="The model failed", outcome=Outcome.MODEL_ERROR): ...


class UpstreamProtocol(ModelError, title="Triton's answer could not be read"): ...


class ToolCallMissing(ModelError, title="The model did not call a function"): ...


class FormatMismatch(ModelError, code="response_format_mismatch", title="The model's answer has another format"): ...


class ContractViolation(GatewayError, title="A tensor broke its contract", outcome=Outcome.CONTRACT_VIOLATION):
    """The output ``tensor`` violated its declared type, shape or contract."""

    def __init__(self, detail: str, *, tensor: str, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.tensor = tensor


class Unavailable(GatewayError, outcome=Outcome.UNAVAILABLE):
    """``was_sent``: whether Triton may have begun to work on the request; if it did not, a repetition is safe."""

    retryable = True
    retry_after_s = 1

    def __init__(
        self, detail: str, *, was_sent: bool = True, was_answered: bool = False, retry_after_s: int = 1
    ) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)
        self.was_sent = was_sent
        self.was_answered = was_answered
        """Whether it is the answer of a Triton that works, which would say the same again."""


class UpstreamUnavailable(Unavailable, title="Triton is not available"): ...


class ModelChanged(Unavailable, title="The model changed during the request"): ...


class ModelNotReady(Unavailable, title="The model is not ready"): ...


class DeadlineExceeded(GatewayError, title="The deadline passed", outcome=Outcome.TIMEOUT):
    retryable = True


class Cancelled(GatewayError, outcome=Outcome.CANCELLED): ...


class ClientClosedRequest(Cancelled, title="The client disconnected"): ...


class StreamCancelled(Cancelled, code="cancelled", title="The stream was cancelled"): ...


class SlowConsumer(Cancelled, title="The stream was read too slowly"): ...


class Internal(GatewayError, title="The gateway has a bug", outcome=Outcome.INTERNAL): ...


FailureCode = Literal[
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
]
"""The names of the gRPC status codes, in the order of their numbers, from 1."""
