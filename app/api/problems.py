"""Errors as ``application/problem+json`` (RFC 9457); the only place that knows their HTTP status."""

from typing import Any

import orjson
from starlette.responses import Response

from app.domain import errors
from app.domain.errors import GatewayError

STATUS_BY_ERROR: dict[type[GatewayError], int] = {
    errors.InvalidJson: 400,
    errors.InvalidRequest: 400,
    errors.UnknownPipeline: 404,
    errors.NotFound: 404,
    errors.UnknownStream: 404,
    errors.MethodNotAllowed: 405,
    errors.SlowRequest: 408,
    errors.StreamEvicted: 410,
    errors.PayloadTooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.InvalidInput: 422,
    errors.TooManyRequests: 429,
    errors.HeadersTooLarge: 431,
    errors.ClientClosedRequest: 499,
    errors.SlowConsumer: 499,
    errors.Internal: 500,
    errors.ModelError: 502,
    errors.ContractViolation: 502,
    errors.UpstreamProtocol: 502,
    errors.UpstreamUnavailable: 503,
    errors.ModelNotReady: 503,
    errors.Draining: 503,
    errors.DeadlineExceeded: 504,
}

MEDIA_TYPE = "application/problem+json"
MAX_TEXT = 512


def status_of(error: GatewayError) -> int:
    return STATUS_BY_ERROR[type(error)]


def problem_of(error: GatewayError, request_id: str) -> dict[str, Any]:
    """The problem object; no text in it is longer than MAX_TEXT, so the whole stays under 4 KiB."""
    problem: dict[str, Any] = {
        "type": f"/docs/errors/{error.code}",
        "title": error.title,
        "status": status_of(error),
        "detail": error.detail[:MAX_TEXT],
        "code": error.code,
        "request_id": request_id,
        "retryable": error.retryable,
    }
    if error.errors:
        problem["errors"] = [{"field": found.field[:128], "problem": found.problem[:128]} for found in error.errors[:8]]
    if error.hint:
        problem["hint"] = error.hint[:MAX_TEXT]
    return problem


def problem_response(error: GatewayError, request_id: str) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return Response(orjson.dumps(problem_of(error, request_id)), status_of(error), headers, MEDIA_TYPE)
