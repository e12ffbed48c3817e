"""Errors as ``application/problem+json`` (RFC 9457)."""

from typing import Annotated, NotRequired, TypedDict

import orjson
from msgspec import Meta
from starlette.responses import Response

from app.api.error_table import CODES, ROW_BY_ERROR, headers_of
from app.core.errors import GatewayError
from app.core.text import shown

MEDIA_TYPE = "application/problem+json"
MAX_BYTES = 4096
_MAX_TEXT = 512
_MAX_ITEM = 96
_MAX_ITEMS = 8


class ProblemField(TypedDict):
    field: str
    problem: str


class Problem(TypedDict):
    """An error, as RFC 9457 describes it."""

    type: Annotated[
        str, Meta(description="The address of the page about this code", extra_json_schema={"format": "uri-reference"})
    ]
    title: str
    status: int
    detail: str
    code: Annotated[str, Meta(extra_json_schema={"enum": CODES})]
    request_id: str
    retryable: bool
    hint: NotRequired[str]
    errors: NotRequired[Annotated[list[ProblemField], Meta(max_length=_MAX_ITEMS)]]


def status_of(error: GatewayError) -> int:
    return ROW_BY_ERROR[type(error)].status


def problem_of(error: GatewayError, request_id: str) -> Problem:
    """The problem object. Its JSON has at most MAX_BYTES bytes."""
    problem: Problem = {
        "type": f"/docs/errors/{error.code}",
        "title": error.title,
        "status": status_of(error),
        "detail": _cut(error.detail, _MAX_TEXT),
        "code": error.code,
        "request_id": request_id,
        "retryable": error.retryable,
    }
    if error.errors:
        problem["errors"] = [
            {"field": _cut(found.field, _MAX_ITEM), "problem": _cut(found.problem, _MAX_ITEM)}
            for found in error.errors[:_MAX_ITEMS]
        ]
    if error.hint:
        problem["hint"] = _cut(error.hint, _MAX_TEXT)
    while problem.get("errors") and len(orjson.dumps(problem)) > MAX_BYTES:
        problem["errors"].pop()
    return problem


def _cut(text: str, size: int) -> str:
    """Cuts a text to at most ``size`` bytes of UTF-8 and removes control characters."""
    return shown(text, size).encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def problem_response(error: GatewayError, request_id: str) -> Response:
    return Response(orjson.dumps(problem_of(error, request_id)), status_of(error), headers_of(error), MEDIA_TYPE)
