"""A feature of the requests of all pipelines, in a folder of its own. ``app/process/gateway.py`` lists them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.admission.keys import Key
from app.api.endpoint import Endpoint, EndpointGroup
from app.api.exchange import Exchange
from app.api.openapi import TIMEOUT_HEADER
from app.core.json import Schema
from app.pipelines.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Layer:
    """A request header turns it on."""

    group: EndpointGroup
    """Its endpoints, which every key may call."""
    admin_endpoints: Sequence[Endpoint]
    header: Schema
    """The request header, as a parameter in the OpenAPI document."""
    permission: str
    """A member of ``GET /v1/pipelines``: whether the caller may send the header."""
    allows: Callable[[Key | None], bool]
    """The value of this member."""
    admitted: Callable[[Exchange, Pipeline], None] | None
    """Is called with each admitted request. It may set ``on_end`` of the request's record. None if the layer is off."""

    def complete(self, document: Schema) -> None:
        """Adds the header and the permission to what the dialects describe."""
        paths, schemas = document["paths"], document["components"]["schemas"]
        for path, operations in paths.items():
            parameters = operations.get("post", {}).get("parameters", ())
            if path.startswith("/v1/") and TIMEOUT_HEADER in parameters:
                paths[path] = operations | {"post": operations["post"] | {"parameters": [*parameters, self.header]}}
        if (listed := schemas.get("PipelineList")) is not None:
            member = {"type": "boolean", "description": f"Whether this caller may send `{self.header['name']}`"}
            properties = listed["properties"] | {self.permission: member}
            schemas["PipelineList"] = listed | {"properties": properties, "required": list(properties)}
