"""A feature of the requests of all pipelines, in a folder of its own. ``app/process/gateway.py`` lists them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from app.admission.keys import Key
from app.api.endpoint import Endpoint, EndpointGroup
from app.api.exchange import Exchange, Header
from app.api.openapi import Operation
from app.api.sockets.socket import MessageHandler
from app.core.inference import Deadline, InferenceRequest
from app.core.json import Schema
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec
from app.streams.store import StartedStream, StreamStore


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A whole answer with the status 200."""

    body: bytes
    headers: Sequence[Header]
    early_exit: str | None


class Once(Protocol):
    """Runs a request at most once, also if its caller repeats it."""

    async def answer(
        self, pipeline: str, request: InferenceRequest, deadline: Deadline, run: Callable[[], Awaitable[KeptAnswer]]
    ) -> KeptAnswer:
        """Raises GatewayError."""

    async def start(
        self, store: StreamStore, body: memoryview, run: Callable[[], Awaitable[StartedStream]]
    ) -> StartedStream:
        """Raises GatewayError."""


class Layer:
    """This base class changes nothing."""

    groups: Sequence[EndpointGroup] = ()
    """Its endpoints."""
    admin_endpoints: Sequence[Endpoint] = ()
    headers: Sequence[str] = ()
    """The headers of requests that it reads."""
    answer_headers: ClassVar[Schema] = {}
    """The headers of answers that it sets, as components of the OpenAPI document."""
    flags: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Booleans that it adds to ``GET /v1/pipelines``: schema -> member -> description."""
    admitted: Callable[[Exchange, Pipeline], None] | None = None
    """Is called with each admitted request. It may set ``on_end`` of the request's record. None if the layer is off."""

    once_of: Callable[[Exchange], Once | None] | None = None
    """How a request runs that its caller may repeat; None for any other request. Raises InvalidRequest."""

    def flags_for(self, key: Key | None) -> dict[str, bool]:
        """The members of ``PipelineList``."""
        return {}

    def flags_of(self, spec: PipelineSpec) -> dict[str, bool]:
        """The members of each pipeline."""
        return {}

    def samples_of(self, pipeline: Pipeline, base_url: str, *, with_key: bool) -> dict[str, str] | None:
        """Calls of the pipeline that work as pasted, if they differ from those of other pipelines."""
        return None

    def handler_of(self, exchange: Exchange, pipeline: Pipeline) -> MessageHandler | None:
        """What the messages of a WebSocket of the pipeline run, if no requests. Raises GatewayError."""
        return None

    def described(self, endpoint: Endpoint, operation: Operation) -> Operation:
        """The operation of any endpoint with what the layer adds to it."""
        return operation

    def complete(self, document: Schema) -> None:
        """Adds the other declarations to the OpenAPI document."""
        components = document["components"]
        components["headers"] = components["headers"] | self.answer_headers
        for name, members in self.flags.items():
            if (listed := components["schemas"].get(name)) is not None:
                added = {member: {"type": "boolean", "description": text} for member, text in members.items()}
                required = [*listed["required"], *members]
                components["schemas"][name] = listed | {
                    "properties": listed["properties"] | added,
                    "required": required,
                }


def once_of(layers: Sequence[Layer]) -> Callable[[Exchange], Once | None]:
    """Of the layer that has it."""
    return next((layer.once_of for layer in layers if layer.once_of is not None), lambda _exchange: None)
