"""The application of each port, with its endpoints, the layers of features, and what browsers may send to it.

An endpoint answers one method of one address; ``app/routes.py`` lists all of them. A route is Starlette's, and calls
its endpoint as an ASGI application (decision 3). Files that are mounted and unknown addresses have no endpoint: what
must hold for every request belongs in ``Application``, which turns every exception of a route into an answer in the
form of the route's dialect.

A layer is a feature of requests: what it adds to the endpoints of others, besides its own. ``layers_of`` in
``app/process/gateway.py`` lists all of them.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from fastapi import APIRouter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.admission.keys import FollowedKeys, Key
from app.api.bodies import check_query
from app.api.call import Inference
from app.api.error_table import ErrorForm, problem_response
from app.api.exchange import HINT, ByteBudget, Exchange, hint_of, key_of
from app.api.openapi import EXPOSED_HEADERS, PROBLEMS, ErrorAnswers, Operation, Operations, Visible
from app.core import errors
from app.core.aio import LeakyBucket
from app.core.answer import WholeAnswer
from app.core.inference import Deadline, InferenceRequest
from app.core.json import Schema
from app.core.text import is_loopback, nearest_of
from app.observability.tracing import end_request_span
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec
from app.streams.store import StartedStream, StreamStore

if TYPE_CHECKING:
    from app.api.streaming import MessageHandler

REFUSALS_PER_S = 1000
"""Refusals that are answered in a second. Each takes about 0.2 ms of CPU, which callers that ask again at once would
otherwise take from the models."""
LONGEST_DELAY_S = 1.0

_refusals = LeakyBucket(REFUSALS_PER_S, REFUSALS_PER_S // 10, LONGEST_DELAY_S)
"""The refusals of this process."""
_log = logging.getLogger(__name__)


async def delay_refusal() -> None:
    """Does not wait unless there are too many refusals. The connection is not read meanwhile."""
    now = monotonic()
    delay_s = _refusals.turn(now) - now
    if delay_s > 0:
        await asyncio.sleep(delay_s)


@dataclass(eq=False)
class Application:
    """``scope["state"]["exchange"]`` is the request's :class:`Exchange`.

    Answers domain errors, unexpected exceptions, addresses without a route, and requests that the drain ends. If the
    answer has begun, the exception propagates and the server closes the connection.

    ``hints``: path -> the hint of its 404, with "" for all other paths. ``error_forms``: by the beginning of the path.
    """

    routes: Sequence[BaseRoute]
    inference: Inference
    budget: ByteBudget
    hints: Mapping[str, str]
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    rules: "BrowserRules | None" = None
    cors: Callable[[ASGIApp], ASGIApp] | None = None

    def __post_init__(self) -> None:
        self._router = APIRouter(routes=list(self.routes), redirect_slashes=False)
        posts = (each for each in self.routes if isinstance(each, Route) and "POST" in (each.methods or ()))
        self._inference_routes = [each for each in posts if getattr(each.endpoint, "transport", None) is not None]
        self._beginnings = {"/".join(each.path.split("/")[:3]) for each in self.routes if isinstance(each, Route)}
        self._tracer = self.inference.tracer
        self._app = self._route if self.cors is None else self.cors(self._route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send, self.budget)
        record, span = exchange.record, None
        scope["state"]["exchange"] = exchange
        if self._tracer is not None and record.method == "POST":  # every inference is a POST
            span = self._tracer.start("POST", "SERVER", record.trace)
            record.trace = span.trace
        try:
            if self.rules is not None:
                self.rules.check(exchange)
            await self._app(scope, receive, exchange.send)
        except (Exception, asyncio.CancelledError) as exc:
            error = self._error_of(exc, exchange)
            if error is not None:
                record.fail(error)
            if error is None or exchange.is_answering:
                raise
            if error is not exc and isinstance(error, errors.Internal):
                _log.exception("unexpected error", extra={"request_id": record.request_id})
            if isinstance(error, errors.TooManyRequests):
                await delay_refusal()
            own_form = None if isinstance(exc, HTTPException) else getattr(scope.get("endpoint"), "error_form", None)
            forms = (form for prefix, form in self.error_forms if record.path.startswith(prefix))
            response = (own_form or next(forms, problem_response))(error, record.request_id)
            if isinstance(error, errors.MethodNotAllowed):
                response.headers["Allow"] = self._methods_of(record.path)
            await response(scope, receive, exchange.send)
        finally:
            if span is not None:
                end_request_span(span, record, getattr(scope.get("endpoint"), "path", None))
            record.count(self.inference.metrics)
            exchange.connection.loop.call_soon(self._close, exchange)  # after the answer is written

    def _close(self, exchange: Exchange) -> None:
        self.inference.workload.remove(exchange)
        exchange.close()
        exchange.record.log()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Looks for a route of inference first, as the router would: the router takes 3 us more (decision 3)."""
        scope["app"] = self._router  # Starlette then raises HTTPException if no route matches
        app: ASGIApp = self._router.app
        if scope["method"] == "POST":
            for route in self._inference_routes:
                if (found := route.path_regex.match(scope["path"])) is not None:
                    scope["endpoint"], scope["path_params"], app = route.endpoint, found.groupdict(), route.app
                    break
        await app(scope, receive, send)

    def _error_of(self, exc: BaseException, exchange: Exchange) -> errors.GatewayError | None:
        """Returns the error for the caller; None for a cancellation that is not caused by the drain."""
        if isinstance(exc, errors.GatewayError):
            return exc
        if isinstance(exc, asyncio.CancelledError):
            return exchange.cause_of_cancellation()
        if not isinstance(exc, HTTPException):
            return errors.Internal("The gateway failed. Its log shows the cause under the request's id.")
        path = exchange.record.path
        if exc.status_code == 405:
            reads = " EventSource reads the stream that POST /v1/streams starts." * path.endswith("/stream")
            hint = f"Use one of: {self._methods_of(path)}.{reads}"
            return errors.MethodNotAllowed("This address does not accept this method.", hint=hint)
        if exc.status_code == 404:
            hint = self.hints.get(path, self.hints[""])
            asked = "/".join(path.split("/")[:3])
            if asked not in self._beginnings and (near := nearest_of(asked, self._beginnings, 0.9)):
                hint = f"Did you mean {near}? {hint}"
            return errors.NotFound("The gateway serves nothing at this address.", hint=hint)
        return errors.InvalidRequest("The request is malformed.")

    def _methods_of(self, path: str) -> str:
        """All methods of the routes at the path. Mounts of files support GET and HEAD."""
        routes = [each for each in self.routes if isinstance(each, Route) and each.path_regex.match(path)]
        methods = {method for route in routes for method in route.methods or ()} or {"GET", "HEAD"}
        return ", ".join(sorted(methods, key=METHODS.index))


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
            raise errors.Unauthenticated("The request has no API key.", hint=HINT)
        if self.dialect is not None and not key.speaks(self.dialect):
            text = f"This API key does not allow the dialect '{self.dialect}'."
            raise errors.Forbidden(text, hint=hint_of("dialects"))


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


class Once(Protocol):
    """Runs a request at most once, also if its caller repeats it."""

    async def answer(
        self, pipeline: str, request: InferenceRequest, deadline: Deadline, run: Callable[[], Awaitable[WholeAnswer]]
    ) -> WholeAnswer:
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

    once_header = b""
    """The header of a request that its caller may repeat. Empty if the layer knows none."""

    def once_of(self, exchange: Exchange, value: str) -> Once:
        """How a request runs that has the ``once_header`` with this value. Raises InvalidRequest."""
        raise NotImplementedError

    def flags_for(self, key: Key) -> dict[str, bool]:
        """The members of ``PipelineList``."""
        return {}

    def flags_of(self, spec: PipelineSpec) -> dict[str, bool]:
        """The members of each pipeline."""
        return {}

    def samples_of(self, pipeline: Pipeline) -> str | None:
        """The template of the pipeline's samples, if it is not that of other pipelines."""
        return None

    def handler_of(self, exchange: Exchange, pipeline: Pipeline) -> "MessageHandler | None":
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


_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::[0-9]*)?")
_ADD_ORIGIN = "Add the page's origin to GATEWAY_CORS_ORIGINS."


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """A guard without API keys: a page of another site could use a browser on a machine that can call the gateway.

    It has two ways: a name of its own that resolves to the gateway's address (DNS rebinding), and a form, which needs
    no preflight of CORS.

    ``hosts``: served besides those of loopback. ``origins``: whose pages may send a POST.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    refuses_cross_site: bool = True

    def check(self, exchange: Exchange) -> None:
        """Raises InvalidRequest. A request without the headers of a browser passes."""
        header, server = exchange.header(b"host"), exchange.scope["server"]
        host = None if header is None else host_of(header)
        # The address that the connection was made to is served too: probes use it, and a page cannot take it.
        is_own = host is None or host in self.hosts or _is_loopback(host) or (server is not None and server[0] == host)
        if not is_own:
            raise errors.InvalidRequest(
                "The gateway does not answer for the host of this request.",
                hint="Call it as localhost or 127.0.0.1, or add the host to GATEWAY_ALLOWED_HOSTS.",
            )
        if not self.refuses_cross_site or exchange.record.method != "POST":
            return
        if exchange.header(b"sec-fetch-site") == "cross-site" and not _allows(self.origins, exchange.header(b"origin")):
            raise errors.InvalidRequest("A page of another site sent this request.", hint=_ADD_ORIGIN)


def check_socket_origin(exchange: Exchange, allowed: Collection[str]) -> None:
    """Raises Forbidden for a page of another site that CORS does not allow.

    A browser opens a WebSocket to any address, and sends the page's origin. Requests without an origin pass.
    """
    origin = exchange.header(b"origin")
    if origin is None or _allows(allowed, origin):
        return
    if origin.partition("://")[2].lower() != (exchange.header(b"host") or "").lower():
        raise errors.Forbidden("Pages of this origin may not open a WebSocket.", hint=_ADD_ORIGIN)


def _allows(allowed: Collection[str], origin: str | None) -> bool:
    return origin in allowed or "*" in allowed


@lru_cache(maxsize=128)
def host_of(header: str) -> str:
    """Returns the host of a Host header: in lower case, without port, brackets and final dot."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2] or "").lower().removesuffix(".") if found else header


_is_loopback = lru_cache(maxsize=128)(is_loopback)

READ_HEADERS = (
    *("Authorization", "X-API-Key", "Content-Type", "Last-Event-ID"),
    *("traceparent", "tracestate", "X-Request-Timeout", "X-Request-ID"),
)
IGNORED_HEADERS = (
    "User-Agent",  # Vercel's AI SDK. Firefox asks for it; Chromium does not let a page set it.
    *("baggage", "sentry-trace"),  # OpenTelemetry and Sentry, for every request of a page.
    *("Cache-Control", "Pragma", "X-Requested-With"),  # Libraries for fetch and XMLHttpRequest.
    *("OpenAI-Organization", "OpenAI-Project", "OpenAI-Beta"),  # OpenAI's client, if it is configured with them.
    # Values that are longer than 128 bytes or have unusual characters need a preflight.
    *("Accept", "Accept-Language", "Content-Language"),
)
"""Harmless headers that libraries add in a page. Without them in the list, the browser would send no request."""

_OF_OPENAI = re.compile(r"x-stainless-[a-z0-9-]+")
"""OpenAI's client adds headers of this family; each version adds others, and CORS knows no prefixes."""
METHODS = ("GET", "HEAD", "POST", "DELETE")


class Cors(CORSMiddleware):
    """The request's exchange adds the headers to its answer, whoever sends it. Source: the Fetch standard."""

    def __init__(
        self, app: ASGIApp, origins: Collection[str], headers: Iterable[str] = (), exposed: Iterable[str] = ()
    ) -> None:
        """``headers``: those of requests that are allowed besides the usual ones; ``exposed``: those of answers."""
        allowed = (*READ_HEADERS, *IGNORED_HEADERS, *headers)
        super().__init__(app, origins, METHODS, allowed, expose_headers=(*EXPOSED_HEADERS, *exposed))

    def preflight_response(self, request_headers: Headers) -> Response:
        """Is 204 also for a header that is not allowed: the browser then names it, which it cannot do for an error."""
        headers = super().preflight_response(request_headers).headers
        requested = map(str.strip, request_headers.get("access-control-request-headers", "").lower().split(","))
        headers["access-control-allow-headers"] += "".join(
            f", {name}" for name in requested if _OF_OPENAI.fullmatch(name)
        )
        del headers["content-length"], headers["content-type"]
        return Response(status_code=204, headers=headers)

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        origin = request_headers.get("origin")
        headers = MutableHeaders({"vary": "Origin"})
        if origin is not None and self.is_allowed_origin(origin):
            allowed = "*" if self.allow_all_origins else origin
            headers.update(
                {"timing-allow-origin": allowed, "access-control-allow-origin": allowed, **self.simple_headers}
            )
        scope["state"]["exchange"].cors_headers = headers.raw
        await self.app(scope, receive, send)
