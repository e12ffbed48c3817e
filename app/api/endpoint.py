"""Endpoints and layers. An endpoint answers one method of one address; ``app/routes.py`` lists all of them.

A route is Starlette's, and calls its endpoint as an ASGI application (decision 3). Files that are mounted and unknown
addresses have no endpoint: what must hold for every request belongs in ``Application``.

A layer is a feature of requests: what it adds to the endpoints of others, besides its own. ``layers_of`` in
``app/process/gateway.py`` lists all of them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.admission.keys import FollowedKeys, Key
from app.api.access import HINT, hint_of, key_of
from app.api.bodies import check_query
from app.api.error_table import ErrorForm
from app.api.exchange import Exchange, Header
from app.api.openapi import PROBLEMS, ErrorAnswers, Operation, Operations, Visible
from app.api.sockets import MessageHandler
from app.core.errors import Forbidden, Unauthenticated
from app.core.inference import Deadline, InferenceRequest
from app.core.json import Schema
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec
from app.streams.store import StartedStream, StreamStore

Found = Mapping[str, Any]
"""The parameters in the path of a request."""
Answering = Callable[[Exchange, Found], Awaitable[Response | None]]
"""Returns the response, or None if it has sent the answer itself."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """``described``: in the OpenAPI document; None: not at all. ``transport``: counts a request whose key is refused.

    ``error_form``: None for the form of the dialect.
    """

    method: str
    path: str
    answer: Answering
    described: Operation | Operations | None = None
    transport: str | None = None
    error_form: ErrorForm | None = None
    key: Literal["required", "optional", "ignored"] = "required"
    """``optional``: the address is a secret itself, but a key that is sent must be valid."""
    middleware: Sequence[Middleware] = ()
    keys: FollowedKeys | None = None
    dialect: str | None = None

    def route(self, keys: FollowedKeys | None = None, dialect: str | None = None) -> Route:
        """``keys``: None if no keys are required."""
        self.keys, self.dialect = None if self.key == "ignored" else keys, dialect
        return Route(self.path, self, methods=[self.method], middleware=self.middleware)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        if self.transport is None:  # an inference checks its query after its admission
            check_query(exchange)
        if self.keys is not None:
            exchange.record.transport = self.transport
            self.check_key(exchange)
        response = await self.answer(exchange, scope["path_params"])
        if response is not None:
            await response(scope, receive, send)

    def check_key(self, exchange: Exchange) -> None:
        """Sets the request's key and caller. Raises Unauthenticated, or Forbidden for a key without the dialect."""
        if self.keys is None:
            return
        key = key_of(exchange, self.keys)
        if self.key != "required":
            return
        if key is None:
            raise Unauthenticated("The request has no API key.", hint=HINT)
        if self.dialect is not None and not key.speaks(self.dialect):
            text = f"This API key does not allow the dialect '{self.dialect}'."
            raise Forbidden(text, hint=hint_of("dialects"))


@dataclass(frozen=True, slots=True)
class EndpointGroup:
    """Endpoints that answer errors in one form: a dialect, or what is independent of the dialects."""

    endpoints: Sequence[Endpoint]
    tags: Callable[[Visible], Mapping[str, str]] = lambda _visible: {}
    """Their descriptions in the OpenAPI document, in the order of /docs."""
    errors: ErrorAnswers = PROBLEMS
    dialect: str | None = None
    """Also a name in the ``dialects`` of keys. None for a part that every key may call."""
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    """Path prefix -> the form of errors under it. Errors at other paths are problem objects."""


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
