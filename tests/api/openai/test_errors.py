"""Every error has OpenAI's format, and OpenAI's clients handle it."""

import json

import pytest

from app.api.error_table import ROW_BY_ERROR
from app.api.openai.openai_errors import openai_error_response
from app.core import errors
from app.core.errors import ContractViolation, FieldProblem, GatewayError
from app.pipelines.body import MAX_PROBLEMS

TYPES = {4: "invalid_request_error", 5: "server_error"}
TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_of(kind: type[GatewayError], detail: str = "It failed.", **more: object) -> GatewayError:
    return kind(detail, tensor="T") if kind is ContractViolation else kind(detail, **more)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ROW_BY_ERROR, ids=lambda kind: kind.code)
def test_every_error_has_openais_format(kind: type[GatewayError]) -> None:
    response = openai_error_response(error_of(kind), "rid")
    error = json.loads(response.body)["error"]
    assert error["message"] == "It failed."
    assert error["type"] == TYPE_BY_STATUS.get(response.status_code, TYPES[response.status_code // 100])
    assert error["code"] == ("model_not_found" if kind is errors.UnknownPipeline else kind.code)
    assert response.headers["x-should-retry"] == str(kind.retryable).lower()
    assert response.headers.get("retry-after") == (str(kind.retry_after_s) if kind.retry_after_s else None)


def test_param_names_the_invalid_field() -> None:
    problems = [FieldProblem(f"field {index}", "x" * 2000) for index in range(MAX_PROBLEMS)]
    response = openai_error_response(errors.InvalidInput("y" * 9000, hint="z" * 9000, errors=problems), "rid")
    assert response.status_code == 400
    assert json.loads(response.body)["error"]["param"] == "field 0"
    assert len(response.body) <= 4096


def test_a_hint_is_appended_to_the_message() -> None:
    response = openai_error_response(errors.ModelError("It failed.", hint="Ask."), "rid")
    assert json.loads(response.body)["error"]["message"] == "It failed. Ask."
