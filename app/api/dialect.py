"""What the application asks of a dialect. Each dialect is a folder beside this file: decision 0029."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter

from app.api.failures import ErrorForm
from app.api.openapi.document import Described
from app.api.short_path import ShortRoute


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to speak to the gateway, over the same pipelines, engine, limits and streams as every other."""

    routers: Sequence[APIRouter]
    short_routes: Sequence[ShortRoute]
    """The routes of inference."""
    described: Callable[[], Described]
    """Its part of the OpenAPI document, as the models are now."""
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    """Beginning of a path -> the form of an error there. Elsewhere an error is a problem object."""
