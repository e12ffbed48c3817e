"""Observed texts and codes of Triton are converted to errors of the gateway, which never contain Triton's text."""

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc.aio import AioRpcError, Metadata

from app.core.errors import (
    ContractViolation,
    DeadlineExceeded,
    Fault,
    FaultKind,
    GatewayError,
    ModelError,
    ModelNotReady,
    PayloadTooLarge,
    TooManyRequests,
    UpstreamProtocol,
    UpstreamUnavailable,
)
from app.core.inference import OpenSequence
from app.grpc.rpc import RpcError
from app.triton.grpc_errors import error_of_call, fault_in, gateway_error_of, note_lost_sequence
from app.triton.grpcio import rpc_error_of

PREFIXES = [
    "",
    "in ensemble 'e', ",
    "in ensemble 'outer', in ensemble 'inner', ",
    "[request id: 5] ",
    "in ensemble 'outer', in ensemble 'e', [request id: 0123abc] ",
]
NOT_GIVEN = (
    "expected 1 inputs but got 0 inputs for model 'ident'. Got input(s) [], but missing required input(s) ['X']. "
    "Please provide all required input(s)."
)
SHAPE = "unexpected shape for input 'TOK' for model 'post1'. Expected [1], got [2]."

BY_TEXT = [
    ("UNAVAILABLE", "Exceeds maximum queue size", TooManyRequests),
    ("UNAVAILABLE", "Request timeout expired", UpstreamUnavailable),
    ("NOT_FOUND", "Request for unknown model: 'x' is not found", ModelNotReady),
    ("NOT_FOUND", "Request for unknown model: 'x' has no available versions", ModelNotReady),
    ("UNAVAILABLE", "Request for unknown model: 'x' has no available versions", ModelNotReady),
    ("INTERNAL", "Stub process 'm_0_0' is not healthy.", ModelError),
    ("INVALID_ARGUMENT", NOT_GIVEN, ContractViolation),
    ("INVALID_ARGUMENT", SHAPE, ContractViolation),
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("code", ["INTERNAL", None])
def test_with_repair_a_dead_process_is_a_model_that_is_not_ready(code: str | None, prefix: str) -> None:
    message = f"{prefix}Stub process 'm_0_0' is not healthy."
    found = gateway_error_of(code, message, "m", is_repaired=True)
    assert isinstance(found, ModelNotReady)
    assert found.retryable
    assert found.retry_after_s
    found = gateway_error_of(code, message, "m")
    assert (type(found), found.retryable) == (ModelError, False)
    assert "GATEWAY_TRITON_REPAIR" in (found.hint or "")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("code", "text", "error"), BY_TEXT + [(None, *row[1:]) for row in BY_TEXT])
def test_a_known_text_is_recognized_after_its_prefixes(
    code: str | None, text: str, error: type[GatewayError], prefix: str
) -> None:
    """Inside a stream it has no code."""
    found = gateway_error_of(code, prefix + text, "m")
    assert type(found) is error
    assert found.upstream is not None
    assert (found.upstream.grpc_code, found.upstream.message) == (code, prefix + text)


@pytest.mark.parametrize(("code", "text", "_error"), BY_TEXT)
def test_a_known_text_with_another_code_is_a_model_error(code: str, text: str, _error: type[GatewayError]) -> None:
    assert code != "DATA_LOSS"
    assert type(gateway_error_of("DATA_LOSS", text, "m")) is ModelError


@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        ("DEADLINE_EXCEEDED", "whatever", DeadlineExceeded),
        ("UNAVAILABLE", "whatever", UpstreamUnavailable),
        *[
            (code, "whatever", ModelError)
            for code in (
                *("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "CANCELLED", "INTERNAL"),
                *("UNKNOWN", "UNIMPLEMENTED", None),
            )
        ],
        # a quoted text of Triton is not its own
        *[
            (code, text, error)
            for code, error in (("UNAVAILABLE", UpstreamUnavailable), (None, ModelError))
            for text in (
                "user says: Exceeds maximum queue size",
                "Exceeds maximum queue size\n",
                "Exceeds maximum queue size, and more",
                "in ensemble 'e' Exceeds maximum queue size",
            )
        ],
        # a text of gRPC inside a stream
        (None, "failed to connect to all addresses", ModelError),
        # a smaller limit of Triton
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5000000 vs. 4194304)", PayloadTooLarge),
    ],
)
def test_errors_for_a_code_and_its_text(code: str | None, text: str, error: type[GatewayError]) -> None:
    assert type(gateway_error_of(code, text, "m")) is error


RAISED = "Failed to process the request(s) for model 'm_0_0', message: "
SHM = "Failed to increase the shared memory pool size for key 'triton_x' to 67108864 bytes: No space left on device"


@pytest.mark.parametrize(
    ("code", "text", "hint"),
    [
        ("RESOURCE_EXHAUSTED", "Stream removed (received metadata size exceeds hard limit (value length 9))", "4 KiB"),
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (9 vs. 8)", "decoupled"),
        ("RESOURCE_EXHAUSTED", "a message of 9 bytes; at most 8 are read", "decoupled"),
        ("INTERNAL", "Stub process 'm_0_0' is not healthy.", "load the model"),
        *[
            (code, prefix + SHM, "shmSize")
            for code in ("INTERNAL", None)
            for prefix in ("", "in ensemble 'e', ", RAISED)
        ],
    ],
)
def test_an_error_of_a_model_gets_a_hint(code: str | None, text: str, hint: str) -> None:
    error = gateway_error_of(code, text, "m")
    assert type(error) is ModelError
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("text", "was_sent"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused", False),
        ("Stream removed (failed to connect to all addresses; last error: x)", False),
        ("errors resolving triton:8001: [field:hostname lookup error: Domain name not found]", False),
        ("Stream removed (Socket closed)", True),
        ("the model failed to connect to all addresses", True),
        ("Request timeout expired", True),
    ],
)
def test_only_a_failed_connection_means_nothing_was_sent(text: str, was_sent: bool) -> None:
    error = error_of_call(failed(grpc.StatusCode.UNAVAILABLE, text), "m")
    assert isinstance(error, UpstreamUnavailable)
    assert error.was_sent is was_sent


UNFIT = "unexpected shape for input 'X' for model 'ident'. Expected [-1,3,320,320], got [0]. "


@pytest.mark.parametrize("code", ["INTERNAL", "UNKNOWN", "INVALID_ARGUMENT", "ALREADY_EXISTS", None])
@pytest.mark.parametrize(
    "text", [f"{RAISED}ValueError: secret\n\nAt:\n  /abs/model.py(21)", UNFIT.replace("ident", "secret")]
)
def test_the_text_of_triton_is_not_shown(code: str | None, text: str) -> None:
    error = gateway_error_of(code, text, "m")
    for shown in (error.detail, error.hint or ""):
        assert "secret" not in shown
        assert "/abs" not in shown


def failed(code: grpc.StatusCode, text: str | None) -> RpcError:
    return rpc_error_of(AioRpcError(code, Metadata(), Metadata(), text))


@pytest.mark.parametrize(
    ("exc", "error"),
    [
        (failed(grpc.StatusCode.INTERNAL, None), ModelError),
        (rpc_error_of(grpc.aio.UsageError("channel is closed")), UpstreamProtocol),
        (rpc_error_of(grpc.aio.InternalError("x")), UpstreamProtocol),
        (DecodeError("x"), UpstreamProtocol),
    ],
    ids=["without a message", "usage", "internal", "decoding"],
)
def test_other_errors_of_a_call(exc: RpcError | DecodeError, error: type[GatewayError]) -> None:
    assert type(error_of_call(exc, "m")) is error


NOT_STARTED = (
    "inference request for sequence 7 to model 'm' must specify the START flag on the first request of the sequence"
)
FATE_OF_SEQUENCES = [
    ("INVALID_ARGUMENT", NOT_STARTED, True, True),
    ("INVALID_ARGUMENT", f"in ensemble 'e', {NOT_STARTED}", True, True),
    (None, f"[request id: 5] {NOT_STARTED}", True, True),
    ("INTERNAL", "Stub process 'm_0_0' is not healthy.", True, True),
    ("UNAVAILABLE", "Socket closed", True, False),
    ("UNAVAILABLE", "Request timeout expired", True, False),
    ("DEADLINE_EXCEEDED", "", True, False),
    ("UNAVAILABLE", "Exceeds maximum queue size", False, False),
    ("UNAVAILABLE", "in ensemble 'e', Exceeds maximum queue size", True, False),
    ("INTERNAL", "the model failed", False, False),
    ("INVALID_ARGUMENT", "a shape is wrong", False, False),
]


@pytest.mark.parametrize(("code", "text", "is_lost", "is_forgotten"), FATE_OF_SEQUENCES)
def test_an_error_tells_the_fate_of_the_sequence(
    code: str | None, text: str, *, is_lost: bool, is_forgotten: bool
) -> None:
    sequence = OpenSequence()
    note_lost_sequence(sequence, gateway_error_of(code, text, "m"))
    assert (sequence.is_lost, sequence.is_forgotten) == (is_lost, is_forgotten)


def test_a_refusal_of_the_gateway_itself_loses_no_sequence() -> None:
    sequence = OpenSequence()
    note_lost_sequence(sequence, UpstreamUnavailable("The breaker is open.", was_sent=False))
    assert not sequence.is_lost
    note_lost_sequence(sequence, UpstreamUnavailable("The stream was ended."))
    assert sequence.is_lost


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (
            "in ensemble 'c', too many items in input 'IDS' for model 'post'. Expected at most 1, got [2].",
            Fault(FaultKind.ITEMS, "c", "post", "IDS", "1", "[2]"),
        ),
        (
            "in ensemble 'c', [request id: 1] expected 1 string elements for inference input 't' for model 'e', got 0",
            Fault(FaultKind.NO_ROWS, "c", "e", "t"),
        ),
    ],
)
def test_a_message_that_no_live_test_causes_is_parsed(message: str, fault: Fault) -> None:
    """live/test_step_faults.py has the others, as Triton sends them."""
    assert fault_in(message) == fault


@pytest.mark.parametrize(
    "message",
    [
        # the rows of the caller's own request
        "[request id: 1] inference request batch-size must be <= 16 for 'e'",
        "[request id: 1] input byte size mismatch for input 'crop' for model 'e'. Expected 48, got 0",
        # of a model
        *("", "no boxes", "internal", "EARLY_EXIT[no_text]"),
        "expected 1 inputs but got 0 inputs for model 'x'." * 100_000,
    ],
    ids=lambda message: message[:40],
)
def test_another_message_is_no_fault_of_a_step(message: str) -> None:
    assert fault_in(message) is None


@pytest.mark.parametrize(
    ("code", "is_fault"),
    [
        *[(code, True) for code in ("INVALID_ARGUMENT", "INTERNAL", None)],
        *[(code, False) for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ALREADY_EXISTS", "CANCELLED")],
    ],
)
def test_the_codes_of_a_fault(code: str | None, is_fault: bool) -> None:
    error = gateway_error_of(code, UNFIT, "ident")
    assert (error.code == "contract_violation", error.fault is not None) == (is_fault, is_fault)
