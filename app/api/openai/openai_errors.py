"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``.

Source: OpenAI's clients. Their error classes depend on the status; for retries they first read ``X-Should-Retry``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypedDict

import orjson
from starlette.responses import Response

from app.api.error_table import ROW_BY_ERROR, headers_of, problem_of
from app.core import errors
from app.core.errors import FieldProblem, GatewayError
from app.pipelines.body import refused

_STATUS_BY_ERROR: dict[type[GatewayError], int] = {errors.InvalidInput: 400}
"""The errors for which OpenAI's status differs from the gateway's."""
_CODE_BY_ERROR: dict[type[GatewayError], str] = {errors.UnknownPipeline: "model_not_found"}
_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@contextmanager
def openai_names(name_by_field: Mapping[str, str]) -> Iterator[None]:
    """Gives the fields of an error in the block the caller's names. A path inside the value may follow a field."""

    def named(problem: FieldProblem) -> FieldProblem:
        for field, name in name_by_field.items():
            rest = problem.field.removeprefix(field)
            if not rest or (rest != problem.field and rest[0] in ".["):
                return FieldProblem(name + rest, problem.problem)
        return problem

    try:
        yield
    except GatewayError as exc:
        if exc.errors:
            is_about_first = exc.detail.startswith(f"'{exc.errors[0].field}' ")
            exc.errors = tuple(map(named, exc.errors))
            if is_about_first:
                exc.detail = refused(exc.errors).detail
        raise


def openai_status_of(kind: type[GatewayError]) -> int:
    return _STATUS_BY_ERROR.get(kind, ROW_BY_ERROR[kind].status)


class OpenAIProblem(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(TypedDict):
    error: OpenAIProblem


def openai_error_of(error: GatewayError, request_id: str) -> OpenAIError:
    """The body of an error, and the last event of a failed stream. At most 4 KiB, as for problem objects."""
    problem, status = problem_of(error, request_id), openai_status_of(type(error))
    first = next(iter(problem.get("errors", ())), None)
    return {
        "error": {
            "message": " ".join(text for text in (problem["detail"], problem.get("hint")) if text),
            "type": _TYPE_BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error"),
            "param": first["field"] if first else None,
            "code": _CODE_BY_ERROR.get(type(error), error.code),
        }
    }


def openai_error_response(error: GatewayError, request_id: str) -> Response:
    headers = {"X-Should-Retry": "true" if error.retryable else "false"} | headers_of(error)
    body = orjson.dumps(openai_error_of(error, request_id))
    return Response(body, openai_status_of(type(error)), headers, "application/json")
