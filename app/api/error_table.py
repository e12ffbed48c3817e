"""One row for each error: its HTTP status, its meaning, and what to do about it; and errors as answers (RFC 9457).

``errors.yaml`` has the rows, and is the only place that knows HTTP statuses of errors; a layer has one of its own.
"""

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import orjson
import yaml
from msgspec import Meta, Struct
from starlette.responses import Response

from app.core import errors
from app.core.errors import GatewayError
from app.core.text import shown


class ErrorRow(Struct, frozen=True, forbid_unknown_fields=True):
    status: int
    meaning: str
    remedy: str
    is_of_replica: bool = False
    """Whether another replica may answer the same request: then the connection is closed, also after a stream."""
    headers: Mapping[str, str] = {}
    """Further headers of the answer. ``{error.name}`` in a value is an attribute of the error."""


ROW_BY_ERROR: dict[type[GatewayError], ErrorRow] = {}
ERROR_BY_CODE: dict[str, type[GatewayError]] = {}
CODES: list[str] = []
"""The keys of ``ERROR_BY_CODE``."""


def add_rows(package: str, names: Mapping[str, Any]) -> None:
    """Adds the errors in ``errors.yaml`` of a package. ``names``: of the module that has their classes."""
    text = files(package).joinpath("errors.yaml").read_text("utf-8")
    kinds = {each.code: each for each in names.values() if isinstance(each, type) and issubclass(each, GatewayError)}
    for code, row in msgspec.convert(yaml.safe_load(text), dict[str, ErrorRow]).items():
        ROW_BY_ERROR[kinds[code]], ERROR_BY_CODE[code] = row, kinds[code]
        CODES.append(code)


add_rows("app.api", vars(errors))


def lenient_status_of(kind: type[GatewayError]) -> int:
    """The status in the dialects that others define: they have no 422."""
    return 400 if kind is errors.InvalidInput else ROW_BY_ERROR[kind].status


def headers_of(error: GatewayError) -> dict[str, str]:
    """The headers of an answer with this error, in every dialect."""
    row = ROW_BY_ERROR[type(error)]
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    headers |= {name: value.format(error=error) for name, value in row.headers.items()}
    if row.is_of_replica:
        headers["Connection"] = "close"
    return headers


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


ErrorForm = Callable[[GatewayError, str], Response]
"""Maps an error and the request's id to the answer."""


def problem_response(error: GatewayError, request_id: str) -> Response:
    return Response(orjson.dumps(problem_of(error, request_id)), status_of(error), headers_of(error), MEDIA_TYPE)
