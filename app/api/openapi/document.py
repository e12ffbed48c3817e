"""The OpenAPI document, joined from the parts of the dialects.

The health operations are independent of the dialects.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from app import __version__
from app.api.openapi.answers import COMPONENTS, json_answer, operation, problems, schemas_of
from app.api.routes.health import Liveness, Readiness
from app.core.json import Schema

_LIVE: Schema = {"200": json_answer("The gateway answers", Liveness), **problems()}
_READY: Schema = {
    "200": json_answer("Every required pipeline can be called", Readiness),
    **problems(),
    "503": json_answer("Triton or a required pipeline is not ready, or the gateway is draining", Readiness),
}
HEALTH_PATHS: Schema = {
    "/health/live": {
        "get": operation(
            "live", "health", "Whether the gateway answers", "For a liveness probe. It does not ask Triton.", _LIVE
        )
    },
    "/health/ready": {
        "get": operation(
            "ready",
            "health",
            "Whether the pipelines can be called",
            "For a readiness probe. The answer has the state of each pipeline, with 200 and with 503.",
            _READY,
        )
    },
}


class Described(NamedTuple):
    """The part of one dialect in the document."""

    paths: Schema
    schemas: Schema
    refusals: Mapping[str, Any]
    """The answers of a request whose key is missing or not sufficient, by status."""
    responses: Mapping[str, Any] = MappingProxyType({})
    """The responses that its operations refer to."""
    bearer_paths: Sequence[str] = ()
    """They may be called without a key: the address is a secret itself."""
    keyless_paths: Sequence[str] = ()
    """They ignore keys."""
    tags: Mapping[str, str] = MappingProxyType({})
    """The description of each tag."""


_INFO: Schema = {
    "title": "triton-gateway",
    "version": __version__,
    "description": "Runs pipelines of models in NVIDIA Triton. The operations and types are those of the models as "
    "they are now.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}
_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this gateway"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key"},
}
_KEY: list[Schema] = [{name: []} for name in _SCHEMES]


def openapi_of(parts: Iterable[Described], *, needs_keys: bool = False) -> Schema:
    """/docs shows the paths in this order."""
    paths: Schema = {}
    schemas: Schema = COMPONENTS["schemas"] | schemas_of(Liveness, Readiness)
    responses: Schema = dict(COMPONENTS["responses"])
    tags = {"health": "For probes"}
    for part in parts:
        tags = {**part.tags, **tags}
        paths |= _with_keys(part) if needs_keys else part.paths
        schemas |= part.schemas
        responses |= part.responses
    paths |= HEALTH_PATHS
    return {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/", "description": "This gateway"}],
        "security": [],
        "tags": [{"name": name, "description": tags[name]} for name in _tags_in(paths)],
        "paths": paths,
        "components": {
            **COMPONENTS,
            "schemas": schemas,
            "responses": responses,
            **({"securitySchemes": _SCHEMES} if needs_keys else {}),
        },
    }


def _tags_in(paths: Schema) -> Iterable[str]:
    """The tags in the order of their first use, which is the order in /docs."""
    return dict.fromkeys(tag for path in paths.values() for operation in path.values() for tag in operation["tags"])


def _with_keys(part: Described) -> Schema:
    """Its paths, where each operation says which key it needs, and how it refuses a request."""
    return {
        path: operations if path in part.keyless_paths else _operations_with_keys(part, path, operations)
        for path, operations in part.paths.items()
    }


def _operations_with_keys(part: Described, path: str, operations: Schema) -> Schema:
    security = [{}, *_KEY] if path in part.bearer_paths else _KEY
    return {
        method: described | {"security": security, "responses": {**described["responses"], **part.refusals}}
        for method, described in operations.items()
    }
