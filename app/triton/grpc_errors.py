"""Converts errors of Triton and gRPC to domain errors. No other module does this.

The texts are those of Triton 2.51. They are not forwarded to callers. The most specific row of a table comes first.
"""

import re
from collections.abc import Callable

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
from app.triton.connect import MAX_MESSAGE_BYTES

REPAIR_S = 3
"""``Retry-After`` while a model is loaded again: about the time from the first error to the first answer."""
_LIMIT = f"{MAX_MESSAGE_BYTES} bytes"
LONGEST_MESSAGE = 4096

_MODEL = r"'(?P<model>[^']*)'"
_INPUT = r"input '(?P<tensor>[^']*)'"
_SHAPE = r"\[[-\d,]*\]"
_FAILED_SCRIPT = (
    r"Failed to process the request\(s\) for model (?:instance )?'(?P<model>[^']*?)(?:_\d+_\d+)?', message: "
)
_CHILD = r"(?:in ensemble '[^']*', |Error when running inference: )(?:\[request id: [^\]]*\] )?"
"""The text before an error of a request that a step or a BLS script sent, not the caller."""
_BROKEN_TENSORS = {
    FaultKind.NOT_GIVEN: (
        "A step did not receive a required input.",
        rf"expected \d+ inputs but got \d+ inputs for model {_MODEL}\..*"
        r"missing required input\(s\) \['(?P<tensor>[^']*)'",
    ),
    FaultKind.SHAPE: (
        "A step received an input whose shape is not the declared shape.",
        rf"unexpected shape for {_INPUT} for model {_MODEL}\. Expected (?P<expected>{_SHAPE}), got (?P<seen>{_SHAPE})",
    ),
    FaultKind.DATATYPE: (
        "A step received an input whose datatype is not the declared datatype.",
        rf"inference {_INPUT} data-type is '(?P<seen>[A-Z0-9]+)', but model {_MODEL} expects '(?P<expected>[A-Z0-9]+)'",
    ),
    FaultKind.ITEMS: (
        "A step received more items than its contract allows.",
        rf"too many items in {_INPUT} for model {_MODEL}\. "
        rf"Expected at most (?P<expected>\d{{1,9}}), got (?P<seen>{_SHAPE})",
    ),
    FaultKind.NO_ROWS: (
        "A step received a batch without rows.",
        rf"{_CHILD}(?:input byte size mismatch for|expected \d+ string elements for inference) {_INPUT} "
        rf"for model {_MODEL}(?:\. Expected \d+)?, got 0\b",
    ),
    FaultKind.MANY_ROWS: (
        "A step received more rows than its `max_batch_size`.",
        rf"{_CHILD}inference request batch-size must be <= (?P<expected>\d{{1,9}}) for {_MODEL}",
    ),
    FaultKind.SPLIT: (
        "An output could not be split among the requests of its batch.",
        r"failed to split the output tensor '(?P<tensor>[^']*)' in responses",
    ),
}
"""Faults of a tensor inside a chain of models: the text of the error, and Triton's message."""
_FAILED_MODELS = {
    FaultKind.RESPONSE_COUNT: (
        "A model's script did not return exactly one response for each request.",
        rf"{_FAILED_SCRIPT}Number of InferenceResponse objects do not match",
    ),
    FaultKind.RETURNED_DECOUPLED: (
        "The script of a decoupled model returned its responses; it must send them.",
        rf"{_FAILED_SCRIPT}Python model '[^']*' is using the decoupled mode and the execute function must return None",
    ),
    FaultKind.DEADLOCK: (
        "An output of an ensemble was never set.",
        r"unexpected deadlock, at least one output is not set",
    ),
    FaultKind.CHILD_DECOUPLED: (
        "A BLS script called a decoupled model as if it had one response.",
        r"Model (?P<model>[^ ]+) - Error when running inference: .* is using the decoupled",
    ),
    FaultKind.CHILD_NOT_READY: (
        "A BLS script called a model that is not ready.",
        r"Model (?P<model>[^ ]+) - Error when running inference: .* is not ready",
    ),
    FaultKind.RAISED: ("A model's script raised an exception.", _FAILED_SCRIPT),
}
"""The same of a model."""
_FAULTS = {**_BROKEN_TENSORS, **_FAILED_MODELS}
_PATTERNS = {kind: re.compile(pattern) for kind, (_, pattern) in _FAULTS.items()}
_FAULT_CODES = frozenset({"INVALID_ARGUMENT", "INTERNAL", "UNIMPLEMENTED", None})
"""Codes of faults inside a chain of models. A BLS model loses the code of the model that it called."""


def fault_in(message: str) -> Fault | None:
    """Parses Triton's message about a fault inside a chain of models; None for any other message.

    Sources: Triton 2.51 (each text was observed, or is in its binary), and ``model_kit.contract``, with which a model
    reports faults that Triton does not check. A text may be anywhere in the message: an ensemble adds the prefixes
    ``in ensemble 'e', `` and ``[request id: r] ``, and a BLS script may include the error of a child. The first
    matching row wins.
    """
    message = message[:LONGEST_MESSAGE]
    for kind, pattern in _PATTERNS.items():
        if found := pattern.search(message):
            ensembles = re.findall(r"in ensemble '([^']*)', ", message[: found.end()])
            return Fault(kind, ensembles[-1] if ensembles else "", **found.groupdict())
    return None


_PREFIX = r"\A(?:in ensemble '[^']*', )*(?:\[request id: [^\]]*\] )?"
_SCRIPT = r"(?:Failed to process the request\(s\) for model (?:instance )?'[^']*', message: )?"
DEAD_PROCESS = re.compile(r"Stub process (?:'([^']*)' )?is not healthy\.")
"""Also of a model that a script called. Triton names a process after its model, its instance group and its instance."""
_DEAD_PROCESS = re.compile(_PREFIX + DEAD_PROCESS.pattern)
_NOT_STARTED = re.compile(
    _PREFIX + r"inference request for sequence .{0,128} to model '[^']*' must specify the START flag on"
)
TOO_LARGE = f"The request's tensors are larger than {_LIMIT}, the limit of a message to Triton."
_TEXTS: tuple[tuple[str, str, Callable[[re.Match[str]], GatewayError]], ...] = (
    (
        "UNAVAILABLE",
        rf"{_PREFIX}Exceeds maximum queue size\Z",
        lambda _: TooManyRequests("The model's queue in Triton is full."),
    ),
    (
        "UNAVAILABLE",
        rf"{_PREFIX}Request timeout expired\Z",
        lambda _: UpstreamUnavailable("The request waited too long in the model's queue in Triton.", was_answered=True),
    ),
    (
        "INVALID_ARGUMENT",
        _NOT_STARTED.pattern,
        lambda _: InvalidInput(
            "inference request must specify the START flag on the first request of the sequence.",
            hint="Send `sequence_start: true` with the first request. Triton also ends a sequence that is idle for "
            "`max_sequence_idle_microseconds`.",
        ),
    ),
    (
        "INVALID_ARGUMENT",
        rf"{_PREFIX}inference request to model '[^']*' must specify batch-size 1 due to requirements of",
        lambda _: InvalidInput("inference request must specify batch-size 1 due to requirements of sequence batcher."),
    ),
    (
        "UNAVAILABLE",
        r"\A(?:Server is stopping|Server not ready)",
        lambda _: UpstreamUnavailable("Triton is shutting down.", was_sent=False),
    ),
    (
        "NOT_FOUND UNAVAILABLE",
        rf"{_PREFIX}Request for unknown model: '",
        # If the model is a step of an ensemble, earlier steps may have run, so the request counts as sent.
        lambda found: ModelNotReady(
            "Triton has no ready version of the model.", was_sent=found[0].startswith("in ensemble")
        ),
    ),
    (
        "INTERNAL",
        _DEAD_PROCESS.pattern,
        lambda _: ModelError(
            "The process of a model died, and Triton does not start it again.",
            hint="Set GATEWAY_TRITON_REPAIR=true, or unload and load the model in Triton. "
            "Triton's log says why the process ended.",
        ),
    ),
    (
        "INTERNAL",
        rf"{_PREFIX}{_SCRIPT}(?:Failed to increase the shared memory pool size|No space left on device)",
        lambda _: ModelError(
            "The process of a model found no room for a tensor in its shared memory, /dev/shm.",
            hint="Make /dev/shm larger: `triton.shmSize` of the chart, `--shm-size` of Docker. It needs about three "
            "times the size of the largest tensors that run at the same time.",
        ),
    ),
    (
        "INTERNAL",
        rf"{_PREFIX}shared memory size specified with the request for output '([^']*)' \(\d+ bytes\) should be",
        lambda found: ContractViolation(f"Output '{found[1]}' is larger than declared.", tensor=found[1]),
    ),
    (
        "RESOURCE_EXHAUSTED",
        r"metadata size exceeds",
        lambda _: ModelError(
            "The model failed with an error text that is too long for gRPC.",
            hint="Keep the texts of a model's errors under 4 KiB.",
        ),
    ),
    (
        "RESOURCE_EXHAUSTED",
        r"CLIENT: Received message larger than max|\Aa message of \d+ bytes",
        lambda _: ModelError(
            f"The model's response is larger than {_LIMIT}, the limit of a message from Triton.",
            hint="Make the outputs smaller, or send them in several responses of a decoupled model.",
        ),
    ),
    ("RESOURCE_EXHAUSTED", r"(?:Received|Sent) message larger than max", lambda _: PayloadTooLarge(TOO_LARGE)),
)
"""The codes of an error, Triton's or gRPC's text, and the error of the gateway."""
_ERRORS = tuple((frozenset(codes.split()), re.compile(pattern), error) for codes, pattern, error in _TEXTS)
_OF_GRPC = frozenset({"RESOURCE_EXHAUSTED"})
"""Only gRPC itself writes texts with this code. They never occur inside a stream."""


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
    error: GatewayError
    rows = (row for row in _ERRORS if (row[0] != _OF_GRPC if grpc_code is None else grpc_code in row[0]))
    if is_repaired and grpc_code in {"INTERNAL", None} and _DEAD_PROCESS.search(message):
        text = "The process of a model died; the gateway loads the model again."
        error = ModelNotReady(text, retry_after_s=REPAIR_S, was_answered=True)
    elif known := next((error_of(found) for _, pattern, error_of in rows if (found := pattern.search(message))), None):
        error = known
    elif grpc_code in _FAULT_CODES and (fault := fault_in(message)):
        text, _ = _FAULTS[fault.kind]
        is_tensor = fault.kind in _BROKEN_TENSORS
        error = ContractViolation(text, tensor=NO_TENSOR) if is_tensor else ModelError(text)
        error.fault = fault  # app.pipelines.model_errors later adds the step and the tensor
    elif grpc_code == "DEADLINE_EXCEEDED":
        error = DeadlineExceeded(f"Model '{model}' did not answer before the deadline.")
    elif grpc_code == "UNAVAILABLE":
        error = UpstreamUnavailable("Triton cannot be reached.")
    else:
        error = ModelError(f"Model '{model}' failed.")
    error.upstream = UpstreamError(grpc_code, message)
    return error


def is_dead_process(error: GatewayError) -> bool:
    """Whether Triton answered that the Python process of a model is dead, also of one that a script called."""
    return error.upstream is not None and DEAD_PROCESS.search(error.upstream.message) is not None


def note_lost_sequence(sequence: OpenSequence, error: GatewayError) -> None:
    """Notes on the sequence of a failed call what the error means for its state.

    A request that did not run leaves the state as it was. After an error of an ensemble it is unknown whether one of
    its steps ran, unless a model failed, which ends no sequence.
    """
    text = "" if error.upstream is None else error.upstream.message
    is_forgotten = _NOT_STARTED.search(text) is not None or is_dead_process(error)
    if isinstance(error, TooManyRequests):
        is_unknown = text.startswith("in ensemble")
    elif isinstance(error, Unavailable):
        is_unknown = error.was_sent or error.upstream is not None
    else:
        is_unknown = isinstance(error, DeadlineExceeded | UpstreamProtocol)
    if is_forgotten or is_unknown:
        sequence.is_lost, sequence.is_forgotten = True, is_forgotten


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
    ("", "the TLS connection failed"),
)
"""Error texts of OpenSSL and grpcio, most specific first -> the cause or the remedy."""


def cause_of_refusal(error: RpcError) -> str:
    """Why Triton, or a proxy in front of it, refuses the gateway's connection or token; empty for another error."""
    if error.code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
        return "the token in GATEWAY_TRITON_TOKEN_FILE is missing, wrong or has expired"
    if error.code != "UNAVAILABLE" or not _OF_TLS.search(error.details):
        return ""
    return next(cause for pattern, cause in _CAUSES if re.search(pattern, error.details, re.IGNORECASE))
