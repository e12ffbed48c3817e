"""Every error has a status, an entry in the table, and a small answer without sensitive content."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.error_table import MAX_BYTES, ROW_BY_ERROR, problem_of, problem_response
from app.core.errors import (
    ContractViolation,
    Draining,
    FieldProblem,
    GatewayError,
    InvalidInput,
    ModelError,
    UpstreamError,
)
from tests.core.test_errors import concrete

CODES_BY_STATUS = {
    400: {"invalid_json", "invalid_request", "context_length_exceeded"},
    401: {"unauthenticated"},
    403: {"forbidden"},
    404: {
        *("unknown_pipeline", "unknown_model", "unknown_stream", "unknown_session", "unknown_request"),
        *("unknown_example", "not_found"),
    },
    405: {"method_not_allowed"},
    408: {"slow_request"},
    409: {"step_out_of_turn"},
    410: {"session_lost", "stream_evicted"},
    413: {"payload_too_large"},
    415: {"unsupported_media_type"},
    422: {"idempotency_key_reused", "invalid_input"},
    429: {"too_many_requests"},
    426: {"upgrade_required"},
    431: {"headers_too_large"},
    499: {"cancelled", "client_closed_request", "slow_consumer"},
    500: {"internal"},
    501: {"resumable_streams_off", "http_sessions_off"},
    502: {"model_error", "contract_violation", "upstream_protocol", "tool_call_missing", "response_format_mismatch"},
    503: {"upstream_unavailable", "model_changed", "model_not_ready", "draining"},
    504: {"deadline_exceeded"},
}
"""The documented error codes of each status."""


def error_of(error: type[GatewayError], detail: str = "It failed.") -> GatewayError:
    return error(detail, tensor="T") if issubclass(error, ContractViolation) else error(detail)


@pytest.mark.parametrize("error", concrete())
def test_every_error_has_a_status_a_meaning_and_a_remedy(error: type[GatewayError]) -> None:
    row = ROW_BY_ERROR[error]
    assert problem_response(error_of(error), "rid").status_code == row.status
    assert row.meaning.endswith(".")
    assert row.remedy.endswith(".")


def test_errors_have_the_documented_statuses() -> None:
    by_status: dict[int, set[str]] = {}
    for error, row in ROW_BY_ERROR.items():
        by_status.setdefault(row.status, set()).add(error.code)
    assert by_status == CODES_BY_STATUS


def test_a_problem_has_the_fields_of_rfc_9457_and_its_own() -> None:
    error = InvalidInput("No.", hint="Try.", errors=[FieldProblem("x", "is required")])
    error.upstream = UpstreamError("INTERNAL", "/secret/path")
    response = problem_response(error, "rid")
    assert response.status_code == 422
    assert response.media_type == "application/problem+json"
    assert json.loads(bytes(response.body)) == {
        "type": "/docs/errors/invalid_input",
        "title": "The input does not fit the pipeline",
        "status": 422,
        "detail": "No.",
        "code": "invalid_input",
        "request_id": "rid",
        "retryable": False,
        "errors": [{"field": "x", "problem": "is required"}],
        "hint": "Try.",
    }


def test_retryable_errors_have_retry_after() -> None:
    assert problem_response(Draining("bye"), "rid").headers["Retry-After"] == "1"
    assert "Retry-After" not in problem_response(ModelError("no"), "rid").headers


long_text = st.text(alphabet=st.characters(), min_size=400, max_size=700) | st.sampled_from(
    ["\0" * 9999, '"' * 9999, "\\" * 9999, "\U0001f600" * 9999, "\ud800" * 9999, "\u2028" * 9999, "x" * 10**6]
)


@given(long_text, long_text, st.lists(st.tuples(long_text, long_text), max_size=20))
def test_no_answer_is_larger_than_four_kibibytes(detail: str, hint: str, items: list[tuple[str, str]]) -> None:
    error = InvalidInput(detail, hint=hint, errors=[FieldProblem(*each) for each in items])
    body = orjson.dumps(problem_of(error, "r" * 128))
    assert len(body) <= MAX_BYTES == 4096
    assert json.loads(body)["code"] == "invalid_input"
    assert len(json.loads(body).get("errors", [])) <= 8


def test_quotation_marks_in_a_hint_are_kept() -> None:
    assert problem_of(InvalidInput("", hint='Send {"x": 1}.'), "rid")["hint"] == 'Send {"x": 1}.'
