"""Converts errors of Triton and gRPC to domain errors. No other module does this.

The texts are those of Triton 2.51. They are not forwarded to callers. The most specific row of a table comes first.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from app.core.errors import (
    NO_TENSOR,
    ContractViolation,
    DeadlineExceeded,
    Fault,
    FaultKind,
    GatewayError,
    InvalidInput,
    ModelError,
    ModelNotReady,
    PayloadTooLarge,
    TooManyRequests,
    Unavailable,
    UpstreamError,
    UpstreamProtocol,
    UpstreamUnavailable,
)
from app.core.inference import OpenSequence
from app.grpc.rpc import BrokenExchange, RpcError
from app.triton.service import MAX_MESSAGE_BYTES

_MODEL = r"'(?P<model>[^']*)'"
_SHAPE = r"\[[-\d,]*\]"
_FAILED_SCRIPT = (
    r"Failed to process the request\(s\) for model (?:instance )?'(?P<model>[^']*?)(?:_\d+_\d+)?', message: "
)

_CHILD = r"(?:in ensemble '[^']*', |Error when running inference: )(?:\[request id: [^\]]*\] )?"
"""What precedes a text about a request that a step or a BLS script sent, not the caller."""

_PATTERN_BY_KIND = (
    (
        FaultKind.NOT_GIVEN,
        rf"expected \d+ inputs but got \d+ inputs for model {_MODEL}\..*"
        r"missing required input\(s\) \['(?P<tensor>[^']*)'",
    ),
    (
        FaultKind.SHAPE,
        rf"unexpected shape for input '(?P<tensor>[^']*)' for model {_MODEL}\. "
        rf"Expected (?P<expected>{_SHAPE}), got (?P<seen>{_SHAPE})",
    ),
    (
        FaultKind.DATATYPE,
        rf"inference input '(?P<tensor>[^']*)' data-type is '(?P<seen>[A-Z0-9]+)', but model {_MODEL} "
        r"expects '(?P<expected>[A-Z0-9]+)'",
    ),
    (
        FaultKind.ITEMS,
        rf"too many items in input '(?P<tensor>[^']*)' for model {_MODEL}\. "
        rf"Expected at most (?P<expected>\d{{1,9}}), got (?P<seen>{_SHAPE})",
    ),
    (
        FaultKind.NO_ROWS,
        rf"{_CHILD}input byte size mismatch for input '(?P<tensor>[^']*)' for model {_MODEL}\. Expected \d+, got 0\b",
    ),
    (
        FaultKind.NO_ROWS,
        rf"{_CHILD}expected \d+ string elements for inference input '(?P<tensor>[^']*)' for model {_MODEL}, got 0\b",
    ),
    (FaultKind.MANY_ROWS, rf"{_CHILD}inference request batch-size must be <= (?P<expected>\d{{1,9}}) for {_MODEL}"),
    (FaultKind.SPLIT, r"failed to split the output tensor '(?P<tensor>[^']*)' in responses"),
    (FaultKind.RESPONSE_COUNT, rf"{_FAILED_SCRIPT}Number of InferenceResponse objects do not match"),
    (
        FaultKind.RETURNED_DECOUPLED,
        rf"{_FAILED_SCRIPT}Python model '[^']*' is using the decoupled mode and the execute function must return None",
    ),
    (FaultKind.DEADLOCK, r"unexpected deadlock, at least one output is not set"),
    (FaultKind.CHILD_DECOUPLED, r"Model (?P<model>[^ ]+) - Error when running inference: .* is using the decoupled"),
    (FaultKind.CHILD_NOT_READY, r"Model (?P<model>[^ ]+) - Error when running inference: .* is not ready"),
    (FaultKind.RAISED, _FAILED_SCRIPT),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERN_BY_KIND)
_LONGEST_MESSAGE = 4096
_ENSEMBLE = re.compile(r"in ensemble '([^']*)', ")


def fault_in(message: str) -> Fault | None:
    """Parses Triton's message about a fault inside a chain of models; None for any other message.

    Sources: Triton 2.51 (each text was observed, or is in its binary), and ``model_kit.contract``, with which a model
    reports faults that Triton does not check. A text may be anywhere in the message: an ensemble adds the prefixes
    ``in ensemble 'e', `` and ``[request id: r] ``, and a BLS script may include the error of a child. The first
    matching row wins.
    """
    message = message[:_LONGEST_MESSAGE]
    for kind, pattern in _PATTERNS:
        if found := pattern.search(message):
            return Fault(kind, _innermost_ensemble(message[: found.end()]), **found.groupdict())
    return None


def _innermost_ensemble(prefix: str) -> str:
    names: list[str] = _ENSEMBLE.findall(prefix)
    return names[-1] if names else ""


REPAIR_S = 3
"""``Retry-After`` while a model is loaded again: about the time from the first error to the first answer."""


@contextmanager
def triton_errors(model: str = "") -> Iterator[None]:
    """Converts every gRPC error in the block to a GatewayError with ``upstream`` set."""
    try:
        yield
    except (RpcError, DecodeError) as exc:
        raise error_of_call(exc, model) from exc


def error_of_call(exc: RpcError | DecodeError, model: str, *, is_repaired: bool = False) -> GatewayError:
    """``is_repaired``: whether the gateway loads a model again whose process died."""
    if isinstance(exc, BrokenExchange | DecodeError):
        return UpstreamProtocol("The exchange with Triton failed: a message could not be sent or read.")
    error = gateway_error_of(exc.code, exc.details, model, is_repaired=is_repaired)
    if isinstance(error, UpstreamUnavailable):
        error.was_sent = error.was_sent and exc.was_sent
        error.was_answered = error.was_answered or exc.is_answer
    return error


def gateway_error_of(grpc_code: str | None, message: str, model: str, *, is_repaired: bool = False) -> GatewayError:
    """Returns the domain error of a failed call.

    Args:
        grpc_code: None for an error in a stream, which has no code.
        message: Triton's text.
        model: the called model.
        is_repaired: whether the gateway loads a model again whose process died.
    """
    error = (
        (_process_is_replaced(grpc_code, message) if is_repaired else None)
        or _error_by_text(grpc_code, message)
        or _error_by_fault(grpc_code, message)
        or _ERROR_BY_CODE.get(grpc_code or "", _model_failed)(model)
    )
    error.upstream = UpstreamError(grpc_code, message)
    return error


def _error_by_fault(grpc_code: str | None, message: str) -> GatewayError | None:
    """Returns an error without names; app.pipelines.error_hints later adds the step and the tensor."""
    fault = fault_in(message) if grpc_code in _FAULT_CODES else None
    if fault is None:
        return None
    broken = _BROKEN_TENSOR.get(fault.kind)
    error = ContractViolation(broken, tensor=NO_TENSOR) if broken else ModelError(_FAILED_MODEL[fault.kind])
    error.fault = fault
    return error


def _error_by_text(grpc_code: str | None, message: str) -> GatewayError | None:
    table = _ERROR_BY_TEXT if grpc_code is None else _ERROR_BY_TEXT + _ERROR_BY_GRPC_TEXT
    for codes, pattern, error_of in table:
        found = pattern.search(message)
        if found and (grpc_code is None or grpc_code in codes):
            return error_of(found)
    return None


def _queue_full(_found: re.Match[str]) -> GatewayError:
    return TooManyRequests("The model's queue in Triton is full.")


def _queue_timeout(_found: re.Match[str]) -> GatewayError:
    error = UpstreamUnavailable("The request waited too long in the model's queue in Triton.")
    error.was_answered = True
    return error


def _sequence_not_started(_found: re.Match[str]) -> GatewayError:
    return InvalidInput(
        "inference request must specify the START flag on the first request of the sequence.",
        hint="Send `sequence_start: true` with the first request. Triton also ends a sequence that is idle for "
        "`max_sequence_idle_microseconds`.",
    )


def _sequence_in_batch(_found: re.Match[str]) -> GatewayError:
    return InvalidInput("inference request must specify batch-size 1 due to requirements of sequence batcher.")


def _is_stopping(_found: re.Match[str]) -> GatewayError:
    return UpstreamUnavailable("Triton is shutting down.", was_sent=False)


def _not_loaded(found: re.Match[str]) -> GatewayError:
    """If the model is a step of an ensemble, earlier steps may have run, so the request counts as sent."""
    return ModelNotReady("Triton has no ready version of the model.", was_sent=found[0].startswith("in ensemble"))


def _process_died(_found: re.Match[str]) -> GatewayError:
    return ModelError(
        "The process of a model died, and Triton does not start it again.",
        hint="Set GATEWAY_TRITON_REPAIR=true, or unload and load the model in Triton. "
        "Triton's log says why the process ended.",
    )


def _process_is_replaced(grpc_code: str | None, message: str) -> GatewayError | None:
    if grpc_code not in {"INTERNAL", None} or not _DEAD_PROCESS.search(message):
        return None
    error = ModelNotReady("The process of a model died; the gateway loads the model again.", retry_after_s=REPAIR_S)
    error.was_answered = True
    return error


def is_dead_process(error: GatewayError) -> bool:
    """Whether Triton answered that the Python process of a model is dead, also of one that a script called."""
    return error.upstream is not None and _DEAD_SOMEWHERE.search(error.upstream.message) is not None


def note_lost_sequence(sequence: OpenSequence, error: GatewayError) -> None:
    """Notes on the sequence of a failed call what the error means for its state.

    A request that did not run leaves the state as it was. After an error of an ensemble nobody knows whether one of its
    steps ran, unless a model failed, which ends no sequence.
    """
    text = "" if error.upstream is None else error.upstream.message
    is_forgotten = _NOT_STARTED.search(text) is not None or is_dead_process(error)
    if is_forgotten or _is_state_unknown(error, text):
        sequence.is_lost, sequence.is_forgotten = True, is_forgotten


def _is_state_unknown(error: GatewayError, text: str) -> bool:
    if isinstance(error, TooManyRequests):
        return text.startswith("in ensemble")
    if isinstance(error, Unavailable):
        return error.was_sent or error.upstream is not None
    return isinstance(error, DeadlineExceeded | UpstreamProtocol)


def _text_too_long(_found: re.Match[str]) -> GatewayError:
    return ModelError(
        "The model failed with an error text that is too long for gRPC.",
        hint="Keep the texts of a model's errors under 4 KiB.",
    )


def _request_too_large(_found: re.Match[str]) -> GatewayError:
    return request_too_large()


def request_too_large() -> GatewayError:
    return PayloadTooLarge(f"The request's tensors are larger than {_LIMIT}, the limit of a message to Triton.")


def _response_too_large(_found: re.Match[str]) -> GatewayError:
    return ModelError(
        f"The model's response is larger than {_LIMIT}, the limit of a message from Triton.",
        hint="Make the outputs smaller, or send them in several responses of a decoupled model.",
    )


def _output_too_large(found: re.Match[str]) -> GatewayError:
    name = found[1]
    return ContractViolation(f"Output '{name}' is larger than declared.", tensor=name)


def _no_shared_memory(_found: re.Match[str]) -> GatewayError:
    return ModelError(
        "The process of a model found no room for a tensor in its shared memory, /dev/shm.",
        hint="Make /dev/shm larger: `triton.shmSize` of the chart, `--shm-size` of Docker. It needs about three times "
        "the size of the largest tensors that run at the same time.",
    )


def _model_failed(model: str) -> GatewayError:
    return ModelError(f"Model '{model}' failed.")


def _deadline_passed(model: str) -> GatewayError:
    return DeadlineExceeded(f"Model '{model}' did not answer before the deadline.")


def _unreachable(_model: str) -> GatewayError:
    return UpstreamUnavailable("Triton cannot be reached.")


_PREFIX = r"\A(?:in ensemble '[^']*', )*(?:\[request id: [^\]]*\] )?"

_SCRIPT = r"(?:Failed to process the request\(s\) for model (?:instance )?'[^']*', message: )?"
_LIMIT = f"{MAX_MESSAGE_BYTES} bytes"
_DEAD_SOMEWHERE = re.compile(r"Stub process (?:'[^']*' )?is not healthy\.")
_NOT_STARTED = re.compile(
    _PREFIX + r"inference request for sequence .{0,128} to model '[^']*' must specify the START flag on"
)
_DEAD_PROCESS = re.compile(_PREFIX + _DEAD_SOMEWHERE.pattern)

_ERROR_BY_TEXT: tuple[tuple[frozenset[str], re.Pattern[str], Callable[[re.Match[str]], GatewayError]], ...] = (
    (frozenset({"UNAVAILABLE"}), re.compile(_PREFIX + r"Exceeds maximum queue size\Z"), _queue_full),
    (frozenset({"UNAVAILABLE"}), re.compile(_PREFIX + r"Request timeout expired\Z"), _queue_timeout),
    (
        frozenset({"INVALID_ARGUMENT"}),
        _NOT_STARTED,
        _sequence_not_started,
    ),
    (
        frozenset({"INVALID_ARGUMENT"}),
        re.compile(_PREFIX + r"inference request to model '[^']*' must specify batch-size 1 due to requirements of"),
        _sequence_in_batch,
    ),
    (frozenset({"UNAVAILABLE"}), re.compile(r"\A(?:Server is stopping|Server not ready)"), _is_stopping),
    (frozenset({"NOT_FOUND", "UNAVAILABLE"}), re.compile(_PREFIX + r"Request for unknown model: '"), _not_loaded),
    (frozenset({"INTERNAL"}), _DEAD_PROCESS, _process_died),
    (
        frozenset({"INTERNAL"}),
        re.compile(_PREFIX + _SCRIPT + r"(?:Failed to increase the shared memory pool size|No space left on device)"),
        _no_shared_memory,
    ),
    (
        frozenset({"INTERNAL"}),
        re.compile(
            _PREFIX + r"shared memory size specified with the request for output '([^']*)' \(\d+ bytes\) should be"
        ),
        _output_too_large,
    ),
)

_ERROR_BY_GRPC_TEXT: tuple[tuple[frozenset[str], re.Pattern[str], Callable[[re.Match[str]], GatewayError]], ...] = (
    (frozenset({"RESOURCE_EXHAUSTED"}), re.compile(r"metadata size exceeds"), _text_too_long),
    (
        frozenset({"RESOURCE_EXHAUSTED"}),
        re.compile(r"CLIENT: Received message larger than max|\Aa message of \d+ bytes"),
        _response_too_large,
    ),
    (frozenset({"RESOURCE_EXHAUSTED"}), re.compile(r"(?:Received|Sent) message larger than max"), _request_too_large),
)
"""Texts of gRPC itself. They never occur inside a stream."""

_FAULT_CODES = frozenset({"INVALID_ARGUMENT", "INTERNAL", "UNIMPLEMENTED", None})
"""Codes of faults inside a chain of models. A BLS model loses the code of the model that it called."""

_BROKEN_TENSOR = {
    FaultKind.NOT_GIVEN: "A step did not receive a required input.",
    FaultKind.SHAPE: "A step received an input whose shape is not the declared shape.",
    FaultKind.DATATYPE: "A step received an input whose datatype is not the declared datatype.",
    FaultKind.ITEMS: "A step received more items than its contract allows.",
    FaultKind.NO_ROWS: "A step received a batch without rows.",
    FaultKind.MANY_ROWS: "A step received more rows than its `max_batch_size`.",
    FaultKind.SPLIT: "An output could not be split among the requests of its batch.",
}
_FAILED_MODEL = {
    FaultKind.RESPONSE_COUNT: "A model's script did not return exactly one response for each request.",
    FaultKind.RETURNED_DECOUPLED: "The script of a decoupled model returned its responses; it must send them.",
    FaultKind.DEADLOCK: "An output of an ensemble was never set.",
    FaultKind.CHILD_DECOUPLED: "A BLS script called a decoupled model as if it had one response.",
    FaultKind.CHILD_NOT_READY: "A BLS script called a model that is not ready.",
    FaultKind.RAISED: "A model's script raised an exception.",
}

_ERROR_BY_CODE: dict[str, Callable[[str], GatewayError]] = {
    "DEADLINE_EXCEEDED": _deadline_passed,
    "UNAVAILABLE": _unreachable,
}


_OF_TLS = re.compile(r"\bssl\b|\btls|handshake|certificate|verification", re.IGNORECASE)
_CAUSES = (
    (r"has expired|certificate_expired", "the certificate of the server or of the gateway has expired"),
    (
        r"mismatch|hostname verification",
        "the certificate of the server does not match the name in GATEWAY_TRITON_URL",
    ),
    (r"certificate.?required|bad.?certificate|handshake.?failure", "set GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY"),
    (r"wrong.?version", "the server does not speak TLS at this port"),
    (r"unknown.?ca", "the server does not trust the certificate in GATEWAY_TRITON_CERT"),
    (r"verify.?failed", "no authority in GATEWAY_TRITON_CA signed the certificate of the server"),
)
"""Error texts of OpenSSL and grpcio, most specific first -> the cause or the remedy."""
_MAX_TEXT = 300

_log = logging.getLogger(__name__)


class Refusals:
    """Explains why Triton, or a proxy in front of it, refuses the gateway's connection or token.

    Tracks the refusals of one Triton, and logs each cause once.
    """

    def __init__(self) -> None:
        self._logged = ""

    def note(self, error: RpcError) -> None:
        """Logs the error if it is a refusal with a new cause."""
        cause = cause_of(error)
        if cause and cause != self._logged:
            self._logged = cause
            _log.error("Triton refuses the gateway: %s", cause, extra={"error": error.details[:_MAX_TEXT]})

    def clear(self) -> None:
        """Call this when Triton answers, so that the next refusal is logged."""
        self._logged = ""


def cause_of(error: RpcError) -> str:
    """Returns the cause of a refusal; empty if the error is not a refusal."""
    if error.code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
        return "the token in GATEWAY_TRITON_TOKEN_FILE is missing, wrong or has expired"
    if error.code != "UNAVAILABLE" or not _OF_TLS.search(error.details):
        return ""
    known = (cause for pattern, cause in _CAUSES if re.search(pattern, error.details, re.IGNORECASE))
    return next(known, "the TLS connection failed")
