"""Parses observed messages of Triton."""

import pytest

from app.core.errors import Fault, FaultKind
from app.triton.grpc_errors import fault_in, gateway_error_of

NOT_GIVEN = (
    "expected 1 inputs but got 0 inputs for model 'ident'. Got input(s) [], but missing required input(s) ['X']. "
    "Please provide all required input(s)."
)
SHAPE = "unexpected shape for input 'X' for model 'ident'. Expected [-1,3,320,320], got [0]. "


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (
            f"in ensemble 'outer', in ensemble 'chain', [request id: 1] {NOT_GIVEN}",
            Fault(FaultKind.NOT_GIVEN, "chain", "ident", "X"),
        ),
        (
            f"in ensemble 'chain', [request id: 1] {SHAPE}",
            Fault(FaultKind.SHAPE, "chain", "ident", "X", "[-1,3,320,320]", "[0]"),
        ),
        (
            f"Failed to process the request(s) for model 'bls_0_0', message: TritonModelException: {SHAPE}\n\nAt:\n",
            Fault(FaultKind.SHAPE, "", "ident", "X", "[-1,3,320,320]", "[0]"),
        ),
        (
            "in ensemble 'c', inference input 'X' data-type is 'FP64', but model 'ident' expects 'FP32'",
            Fault(FaultKind.DATATYPE, "c", "ident", "X", "FP32", "FP64"),
        ),
        (
            "in ensemble 'c', too many items in input 'IDS' for model 'post'. Expected at most 1, got [2].",
            Fault(FaultKind.ITEMS, "c", "post", "IDS", "1", "[2]"),
        ),
        (
            "in ensemble 'o', in ensemble 'c', [request id: 1] input byte size mismatch for input 'crop' for model "
            "'e'. Expected 48, got 0",
            Fault(FaultKind.NO_ROWS, "c", "e", "crop"),
        ),
        (
            "in ensemble 'c', [request id: 1] expected 1 string elements for inference input 't' for model 'e', got 0",
            Fault(FaultKind.NO_ROWS, "c", "e", "t"),
        ),
        (
            "Model e - Error when running inference: [request id: <id_unknown>] inference request batch-size must be "
            "<= 16 for 'e'",
            Fault(FaultKind.MANY_ROWS, "", "e", expected="16"),
        ),
        (
            "in ensemble 'c', failed to split the output tensor 'dets' in responses: expected batch size of at least 2 "
            "in model output, got 1",
            Fault(FaultKind.SPLIT, "c", tensor="dets"),
        ),
        (
            "Failed to process the request(s) for model 'a_b_0_0', message: Number of InferenceResponse objects do not "
            "match the number of InferenceRequest objects.",
            Fault(FaultKind.RESPONSE_COUNT, model="a_b"),
        ),
        (
            "Failed to process the request(s) for model 'gen_0_1', message: Python model 'gen_0_1' is using the "
            "decoupled mode and the execute function must return None.",
            Fault(FaultKind.RETURNED_DECOUPLED, model="gen"),
        ),
        (
            "in ensemble 'c', [request id: 1] unexpected deadlock, at least one output is not set while no more "
            "ensemble steps can be made",
            Fault(FaultKind.DEADLOCK, "c"),
        ),
        (
            "Model gen - Error when running inference: Model gen is using the decoupled. The current BLS request call "
            "doesn't support models using the decoupled transaction policy.",
            Fault(FaultKind.CHILD_DECOUPLED, model="gen"),
        ),
        (
            "Model gone - Error when running inference: Failed for execute the inference request. Model 'gone' is not "
            "ready.",
            Fault(FaultKind.CHILD_NOT_READY, model="gone"),
        ),
        (
            "Failed to process the request(s) for model instance 'm_0_0', message: ValueError: a user's words",
            Fault(FaultKind.RAISED, model="m"),
        ),
    ],
)
def test_a_message_of_triton_is_parsed(message: str, fault: Fault) -> None:
    assert fault_in(message) == fault


@pytest.mark.parametrize(
    "message",
    [
        "[request id: 1] inference request batch-size must be <= 16 for 'e'",
        "[request id: 1] input byte size mismatch for input 'crop' for model 'e'. Expected 48, got 0",
    ],
)
def test_the_rows_of_the_callers_own_request_are_no_fault_of_a_step(message: str) -> None:
    assert fault_in(message) is None


@pytest.mark.parametrize("message", ["", "no boxes", "internal", "EARLY_EXIT[no_text]"])
def test_a_message_of_a_model_is_not_a_fault(message: str) -> None:
    assert fault_in(message) is None


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", None])
def test_a_fault_is_recognized_without_its_code(code: str | None) -> None:
    assert gateway_error_of(code, SHAPE, "ident").code == "contract_violation"


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "ALREADY_EXISTS", "CANCELLED"])
def test_other_codes_are_not_faults(code: str) -> None:
    assert gateway_error_of(code, SHAPE, "ident").fault is None


def test_names_in_a_message_are_not_shown() -> None:
    error = gateway_error_of("INVALID_ARGUMENT", SHAPE.replace("ident", "<b>"), "m")
    assert "<b>" not in f"{error.detail}{error.hint}"


def test_a_huge_message_is_parsed_quickly() -> None:
    assert fault_in("expected 1 inputs but got 0 inputs for model 'x'." * 100_000) is None
