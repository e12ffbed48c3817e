"""Turns the errors that routes raise into problem objects. UnexpectedErrorMiddleware answers all other exceptions."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.api.problems import problem_response
from app.api.routing import methods_of_path
from app.api.state import record_of
from app.domain.errors import GatewayError, InvalidRequest, MethodNotAllowed, NotFound


def add_failure_handlers(app: FastAPI, hint: str, hint_by_path: Mapping[str, str]) -> None:
    """``hint``: of a 404 at a path that ``hint_by_path`` does not have."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(HTTPException, _FrameworkRefusals(hint, hint_by_path))


async def _gateway_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, GatewayError)
    record = record_of(request)
    record.fail(exc)
    return problem_response(exc, record.request_id)


@dataclass(frozen=True, slots=True)
class _FrameworkRefusals:
    """Starlette's own errors: no route for the path, or no route for the method."""

    hint: str
    hint_by_path: Mapping[str, str]

    async def __call__(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        if exc.status_code != 405:
            return await _gateway_error(request, self._error_of(exc.status_code, request.scope["path"]))
        allowed = ", ".join(methods_of_path(request))
        refusal = MethodNotAllowed("This address does not accept this method.", hint=f"Use one of: {allowed}.")
        response = await _gateway_error(request, refusal)
        response.headers["Allow"] = allowed
        return response

    def _error_of(self, status: int, path: str) -> GatewayError:
        if status == 404:
            hint = self.hint_by_path.get(path, self.hint)
            return NotFound("The gateway serves nothing at this address.", hint=hint)
        return InvalidRequest("The request is malformed.")
