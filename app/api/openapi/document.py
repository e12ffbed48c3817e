"""The OpenAPI document, joined from the parts of the dialects."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from app import __version__
from app.api.openapi.answers import COMPONENTS, Schema
from app.api.openapi.health import HEALTH_PATHS


class Described(NamedTuple):
    """What one dialect adds to the document."""

    paths: Schema
    schemas: Schema
    responses: Mapping[str, Any] = MappingProxyType({})
    """Those that its operations refer to."""


def openapi_of(parts: Iterable[Described]) -> Schema:
    paths: Schema = dict(HEALTH_PATHS)
    schemas: Schema = dict(COMPONENTS["schemas"])
    responses: Schema = dict(COMPONENTS["responses"])
    for part in parts:
        paths |= part.paths
        schemas |= part.schemas
        responses |= part.responses
    return {
        "openapi": "3.1.0",
        "info": {"title": "triton-gateway", "version": __version__},
        "paths": paths,
        "components": {**COMPONENTS, "schemas": schemas, "responses": responses},
    }
