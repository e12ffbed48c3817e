"""The OpenAPI 3.1 document, made from the endpoints and from the types of their bodies and answers; and the pages.

``app/routes.py`` gives each endpoint an :class:`Operation`, or a function that returns those of the pipelines and
models that the caller may use. Their schemas may contain types, which become references to components. The default of
their texts is the docstring of the function that answers.

The pages for people are ``/docs``, a page for each error code, and the console. All work offline: a policy lets a page
load only the gateway's own files.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.resources import files
from os import PathLike, stat_result
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from jinja2 import Environment
from starlette.datastructures import Headers
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from app import __version__
from app.api.error_table import ERROR_BY_CODE, MEDIA_TYPE, ROW_BY_ERROR, Problem
from app.api.exchange import Exchange, JsonResponse, allows_model
from app.core import errors
from app.core.errors import GatewayError, NotFound
from app.core.json import COUNT, TEXT, Schema, const_of, json_of, object_of, with_types
from app.core.model import ModelConfig
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline

if TYPE_CHECKING:
    from app.api.endpoint import Answering, Endpoint, EndpointGroup, Found, Layer


def answer_headers(*headers: tuple[str, str, bool, Schema]) -> Schema:
    """Headers of answers as components. Of each: name, description, whether it is always there, and schema."""
    return {
        name: {"description": text, **({"required": True} if is_required else {}), "schema": schema}
        for name, text, is_required, schema in headers
    }


ON_EVERY_ANSWER = ("X-Request-ID", "Server-Timing")
_HEADERS: Schema = answer_headers(
    ("X-Request-ID", "The request's id, also in the log", True, TEXT),
    ("Server-Timing", "Milliseconds in the gateway, and in Triton, until the answer began", False, TEXT),
    ("X-Early-Exit", "The reason of an early exit", False, TEXT),
    ("Retry-After", "Seconds to wait before a retry", True, COUNT),
    ("WWW-Authenticate", "How to send an API key", True, const_of("Bearer")),
    ("Location", "The address of what the request has started", True, {**TEXT, "format": "uri-reference"}),
)
EXPOSED_HEADERS = (*(name for name in _HEADERS if name != "WWW-Authenticate"), "X-Should-Retry")
"""Pages of other origins can read them."""
ANYWHERE = (errors.InvalidRequest, errors.SlowRequest, errors.HeadersTooLarge, errors.Internal)
REFUSED = (errors.Unauthenticated, errors.Forbidden)
"""Only if the gateway requires API keys."""
INFERENCE_ERRORS = (
    errors.InvalidJson,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
    errors.InvalidInput,
    errors.ContextLengthExceeded,
    errors.TooManyRequests,
    errors.ModelError,
    errors.ContractViolation,
    errors.UpstreamProtocol,
    errors.UpstreamUnavailable,
    errors.ModelNotReady,
    errors.ModelChanged,
    errors.Draining,
    errors.DeadlineExceeded,
)


def header(name: str, schema: Schema, description: str) -> Schema:
    """A header of a request."""
    return {"name": name, "in": "header", "schema": schema, "description": description}


def in_path(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": schema}


TIMEOUT_HEADER = header(
    "X-Request-Timeout",
    {"type": "number", "exclusiveMinimum": 0},
    "Seconds until the deadline. The pipeline's own deadline is the upper limit.",
)
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


class Named(NamedTuple):
    """A schema with a name of its own in the components."""

    name: str
    schema: Callable[[], Schema]


def named(name: str, properties: Schema, *optional: str) -> Named:
    return Named(name, lambda: object_of(properties, *optional))


class Visible(NamedTuple):
    """What the caller may call, as it is now."""

    pipelines: Sequence[Pipeline]
    models: Sequence[ModelConfig]
    """The models of the Open Inference Protocol."""


@dataclass(frozen=True, slots=True)
class Operation:
    """``answers``: by status, without errors. ``errors``: beyond those that any request can get.

    ``path``: the value of the first path parameter, if the operation is that of one pipeline or model.
    """

    id: str
    tag: str
    answers: Mapping[int, Any]
    errors: Sequence[type[GatewayError]] = ()
    parameters: Sequence[Schema] = ()
    body: Schema | None = None
    """The content, by media type."""
    needs_body: bool = True
    path: str = ""
    is_repeatable: bool = False
    """Whether a layer may run it once for all its repetitions."""
    summary: str = ""
    description: str = ""


Operations = Callable[[Visible], Iterable[Operation]]


@dataclass(frozen=True, slots=True, eq=False)
class ErrorAnswers:
    """How a dialect answers errors: with a response component for each status.

    ``name``: the beginning of their names. ``has_codes``: whether the answers have the codes of the errors.
    """

    name: str
    content: Schema
    status_of: Callable[[type[GatewayError]], int]
    has_codes: bool = True

    def of(self, kinds: Iterable[type[GatewayError]]) -> dict[int, "ErrorAnswer"]:
        """The answers by status."""
        by_status: dict[int, list[type[GatewayError]]] = {}
        for kind in kinds:
            by_status.setdefault(self.status_of(kind), []).append(kind)
        return {status: ErrorAnswer(self, status, kinds) for status, kinds in sorted(by_status.items())}

    def component(self, kinds: Iterable[type[GatewayError]]) -> Schema:
        found = list(kinds)
        texts = [(f"`{kind.code}`: " if self.has_codes else "") + ROW_BY_ERROR[kind].meaning for kind in found]
        headers = ["Retry-After"] if all(kind.retry_after_s is not None for kind in found) else []
        headers += ["WWW-Authenticate"] if found == [errors.Unauthenticated] else []
        return answer(" ".join(texts), self.content, *headers)


class ErrorAnswer(NamedTuple):
    """The answer with one of these errors."""

    form: ErrorAnswers
    status: int
    kinds: Sequence[type[GatewayError]]


PROBLEMS = ErrorAnswers("Problem", {MEDIA_TYPE: {"schema": Problem}}, lambda kind: ROW_BY_ERROR[kind].status)


def answer(description: str, content: Schema | None = None, *headers: str) -> Schema:
    """``headers``: in addition to those of every answer."""
    names = (*ON_EVERY_ANSWER, *headers)
    described = {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names},
    }
    return described | ({"content": content} if content else {})


def json_answer(description: str, schema: Any, *headers: str) -> Schema:
    return answer(description, {"application/json": {"schema": schema}}, *headers)


def document_of(
    groups: Iterable["EndpointGroup"], visible: Visible, layers: Sequence["Layer"] = (), *, needs_keys: bool = False
) -> Schema:
    components = _Components()
    paths: Schema = {}
    tags: dict[str, str] = {}
    for group in groups:
        tags |= {name: text for name, text in group.tags(visible).items() if name not in tags}
        for endpoint in group.endpoints:
            for path, described in _described(endpoint, group.errors, visible, layers, needs_keys=needs_keys):
                paths.setdefault(path, {})[endpoint.method.lower()] = components.resolved(described)
    used = {tag for path in paths.values() for each in path.values() for tag in each["tags"]}
    document = {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/", "description": "This gateway"}],
        "security": [],
        "tags": [{"name": name, "description": text} for name, text in tags.items() if name in used],
        "paths": paths,
        "components": components.all() | ({"securitySchemes": _SCHEMES} if needs_keys else {}),
    }
    for layer in layers:
        layer.complete(document)
    return document


def _described(
    endpoint: "Endpoint", form: ErrorAnswers, visible: Visible, layers: Sequence["Layer"], *, needs_keys: bool
) -> Iterator[tuple[str, Schema]]:
    """The operations of an endpoint with their paths."""
    described = endpoint.described
    if described is None or "{version" in endpoint.path:
        return
    summary, _, description = (inspect.getdoc(endpoint.answer) or "").partition("\n\n")
    refused = REFUSED if needs_keys and endpoint.key != "ignored" else ()
    for own in [described] if isinstance(described, Operation) else described(visible):
        each = reduce(lambda operation, layer: layer.described(endpoint, operation), layers, own)
        responses = form.of(dict.fromkeys((*each.errors, *ANYWHERE, *refused)))
        operation: Schema = {
            "operationId": each.id,
            "summary": each.summary or summary.removesuffix("."),
            "description": each.description or " ".join(description.split()),
            "tags": [each.tag],
            **({"parameters": each.parameters} if each.parameters else {}),
            **({"requestBody": {"required": each.needs_body, "content": each.body}} if each.body else {}),
            "responses": {str(status): value for status, value in sorted((responses | {**each.answers}).items())},
        }
        if refused:
            operation["security"] = [{}, *_KEY] if endpoint.key == "optional" else _KEY
        yield re.sub(r"\{\w+\}", each.path, endpoint.path, count=1) if each.path else endpoint.path, operation


@dataclass(slots=True)
class _Components:
    """What the operations refer to."""

    types: dict[type, None] = field(default_factory=dict)
    schemas: Schema = field(default_factory=dict)
    errors: dict[tuple[ErrorAnswers, int], dict[type[GatewayError], None]] = field(default_factory=dict)

    def resolved(self, value: Any) -> Any:
        """Types, named schemas and errors as references."""
        if isinstance(value, type):
            self.types[value] = None
            return {"$ref": f"#/components/schemas/{value.__name__}"}
        if isinstance(value, Named):
            if value.name not in self.schemas:
                self.schemas[value.name] = self.resolved(value.schema())
            return {"$ref": f"#/components/schemas/{value.name}"}
        if isinstance(value, ErrorAnswer):
            self.errors.setdefault((value.form, value.status), {}).update(dict.fromkeys(value.kinds))
            return {"$ref": f"#/components/responses/{value.form.name}{value.status}"}
        if isinstance(value, dict):
            return {name: self.resolved(member) for name, member in value.items()}
        return [self.resolved(each) for each in value] if isinstance(value, list | tuple) else value

    def all(self) -> Schema:
        responses = {
            f"{form.name}{status}": self.resolved(form.component(kinds))
            for (form, status), kinds in sorted(self.errors.items(), key=lambda item: (item[0][0].name, item[0][1]))
        }
        _, schemas = msgspec.json.schema_components(self.types, ref_template="#/components/schemas/{name}")
        own = {name: with_types(schema) for name, schema in schemas.items()}
        for schema in own.values():
            schema.pop("title", None)
            if members := schema.get("properties"):
                # Also those that have a default: an answer leaves out only those that are UNSET.
                schema["required"] = [
                    name for name in members if name in schema["required"] or "default" in members[name]
                ]
                for each in members.values():
                    each.pop("default", None)
        return {"schemas": own | self.schemas, "headers": _HEADERS, "responses": responses}


PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The pages show texts of models and callers, so only the gateway's scripts may run. Caches always revalidate."""

_STATIC = Path(__file__).parent / "static"


class PageFiles(StaticFiles):
    """Serves a folder of files, and the files of further folders that pages share."""

    policy = PAGE_HEADERS["Content-Security-Policy"]

    def __init__(self, directory: Path, *shared: Path, **options: Any) -> None:
        """``options``: those of Starlette's class."""
        super().__init__(directory=directory, **options)
        self.all_directories += shared

    def page(self, name: str) -> "Answering":
        return lambda exchange, _found: self.get_response(name, exchange.scope)

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        headers = {**PAGE_HEADERS, "Content-Security-Policy": self.policy, "Accept-Ranges": "none"}
        # Ignores Range, as RFC 9110 (14.2) allows: the files are small.
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"range"]
        response = FileResponse(full_path, status_code, headers, stat_result=stat_result)
        is_known = self.is_not_modified(response.headers, Headers(scope=scope))
        return NotModifiedResponse(response.headers) if is_known else response


MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Limit of all kept documents together; the newest one is always kept."""

_Scope = tuple[frozenset[str] | None, ...]
"""The pipelines and the dialects that a key allows; None: all of them."""


@dataclass(eq=False)
class Documents:
    """The OpenAPI documents of the catalog as it is now, one for each scope of keys.

    They are kept, because building one takes milliseconds on the event loop.
    """

    groups: Sequence["EndpointGroup"]
    layers: Sequence["Layer"]
    catalog: Catalog
    needs_keys: bool = False
    _described: Sequence[object] = ()
    """What the kept documents describe. A change replaces an object."""
    _kept: dict[_Scope, bytes] = field(default_factory=dict)

    async def openapi(self, exchange: Exchange, _found: "Found") -> Response:
        """Keeps the document, and drops outdated ones, and then the least recently used ones."""
        described = [*(each.pipeline for each in self.catalog.entries.values()), *self.catalog.oip_models.configs]
        if described != self._described:
            self._described = described
            self._kept.clear()
        key = exchange.key
        scope = tuple(None if each is None else frozenset(each) for each in (key.pipelines, key.dialects))
        document = self._kept.pop(scope, None)
        if document is None:
            groups = [each for each in self.groups if each.dialect is None or key.speaks(each.dialect)]
            entries, models = self.catalog.entries.items(), self.catalog.oip_models.configs
            visible = Visible(
                [entry.pipeline for name, entry in entries if entry.pipeline and key.allows(name)],
                [each for each in models if allows_model(key, self.catalog, each.name)],
            )
            document = json_of(document_of(groups, visible, self.layers, needs_keys=self.needs_keys))
        self._kept[scope] = document
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MAX_KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return Response(document, media_type=JsonResponse.media_type)


class SiteFiles(PageFiles):
    """The documentation, whose script styles its search with inline styles."""

    policy = PageFiles.policy.replace("style-src", "style-src 'unsafe-inline'")


SITE = Path(__file__).parents[1] / "site"
"""The documentation, which a wheel has. ``make docs`` builds it in a checkout."""
API_PAGE = PageFiles(_STATIC).page("docs.html")
CONSOLE = PageFiles(Path(__file__).parents[1] / "console" / "static", _STATIC / "shared")


def pages_of_docs(site: Path = SITE) -> list[BaseRoute]:
    """The files of the page ``/docs``, and the pages of the documentation below it, if it was built."""
    assets = PageFiles(_STATIC, _STATIC / "shared", site / "assets", packages=[("fastapi_offline", "static")])
    to_docs = Route("/docs/", lambda _request: RedirectResponse("/docs"))
    return [Mount("/docs/assets", assets), Mount("/docs", SiteFiles(site, html=True)) if site.is_dir() else to_docs]


_ERRORS = Environment(autoescape=True).from_string(files("app.api").joinpath("errors.html").read_text("utf-8"))


async def show_errors(_exchange: Exchange, found: "Found") -> Response:
    """The page about the error with this code; without a code, that of all errors."""
    code = found.get("code")
    if code is not None and code not in ERROR_BY_CODE:
        raise NotFound("No error has this code.", hint="GET /docs/errors lists the codes.")
    rows = sorted(ROW_BY_ERROR.items(), key=lambda item: item[1].status)
    return HTMLResponse(_ERRORS.render(code=code, rows=rows), headers=PAGE_HEADERS)
