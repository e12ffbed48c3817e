"""The OpenAPI document, joined from the parts of the dialects."""

from collections.abc import Iterable
from typing import NamedTuple

from app import __version__
from app.api.openapi.answers import COMPONENTS, Schema
from app.api.openapi.health import HEALTH_PATHS


class Described(NamedTuple):
    """What one dialect adds to the document."""

    paths: Schema
    schemas: Schema


def openapi_of(parts: Iterable[Described]) -> Schema:
    paths: Schema = dict(HEALTH_PATHS)
    schemas: Schema = dict(COMPONENTS["schemas"])
    for part in parts:
        paths |= part.paths
        schemas |= part.schemas
    return {
        "openapi": "3.1.0",
        "info": {"title": "triton-gateway", "version": __version__},
        "paths": paths,
        "components": {**COMPONENTS, "schemas": schemas},
    }
