"""The interface of a dialect. Each dialect is a folder next to this file: decision 0029."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Depends, FastAPI

from app.admission.keys import Key
from app.api.access import AccessCheck
from app.api.failures import ErrorForm
from app.api.openapi.document import Described
from app.api.short_path import ShortRoute


@dataclass(frozen=True, slots=True)
class Dialect:
    """One HTTP API of the gateway. All dialects share the pipelines, the engine, the limits and the streams."""

    name: str
    """The name in the ``dialects`` of keys."""
    routers: Sequence[APIRouter]
    short_routes: Sequence[ShortRoute]
    """The routes of inference."""
    described: Callable[[Key | None], Described]
    """Its part of the OpenAPI document, as the models are now, for the caller with this key."""
    bearer_routers: Sequence[APIRouter] = ()
    """Routes at addresses that are secrets themselves: they need no key."""
    keyless_routers: Sequence[APIRouter] = ()
    """Routes that ignore keys: health."""
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    """Path prefix -> the form of errors under it. Errors at other paths are problem objects."""


def add_routes(app: FastAPI, dialect: Dialect, access: AccessCheck | None) -> None:
    """Adds the routes of a dialect. ``access``: None if no keys are required."""
    required, accepted = ([], []) if access is None else ([Depends(access.required)], [Depends(access.accepted)])
    for router in dialect.routers:
        app.include_router(router, dependencies=required)
    for router in dialect.bearer_routers:
        app.include_router(router, dependencies=accepted)
    for router in dialect.keyless_routers:
        app.include_router(router)
    for route in dialect.short_routes:
        route.guard = None if access is None else access.require
    app.router.routes.extend(dialect.short_routes)
