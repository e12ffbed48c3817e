"""The one place where what a route raises becomes an answer; what nobody foresaw is the recording middleware's."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.api.problems import problem_response
from app.api.state import record_of
from app.domain.errors import GatewayError, InvalidRequest, MethodNotAllowed, NotFound


def add_failure_handlers(app: FastAPI) -> None:
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(HTTPException, _http_exception)


async def _gateway_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, GatewayError)
    record = record_of(request)
    record.fail(exc)
    return problem_response(exc, record.request_id)


async def _http_exception(request: Request, exc: Exception) -> Response:
    """The framework's own refusals: no route, or none for this method."""
    assert isinstance(exc, HTTPException)
    error = _error_of_status(exc.status_code)
    response = await _gateway_error(request, error)
    response.headers.update(exc.headers or {})
    return response


def _error_of_status(status: int) -> GatewayError:
    if status == 404:
        return NotFound("There is nothing at this address.", hint="GET /docs shows every address.")
    if status == 405:
        return MethodNotAllowed("This address does not take this method.")
    return InvalidRequest("The request is malformed.")
