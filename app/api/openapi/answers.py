"""The common parts of operations: their form, the headers of every answer, and problem objects by status.

The common parts of operations that run inference: errors, and the header for the deadline.
"""

from collections.abc import Sequence

import msgspec

from app.api.error_table import ROW_BY_ERROR
from app.api.problems import Problem
from app.core import errors
from app.core.errors import GatewayError
from app.core.json import TEXT, Schema, const_of, with_types

_HEADERS: Schema = {
    "X-Request-ID": {"description": "The request's id, also in the log", "required": True, "schema": TEXT},
    "Server-Timing": {
        "description": "Milliseconds in the gateway, and in Triton, until the answer began",
        "schema": TEXT,
    },
    "X-Early-Exit": {"description": "The reason of an early exit", "schema": TEXT},
    "Retry-After": {
        "description": "Seconds to wait before a retry",
        "required": True,
        "schema": {"type": "integer", "minimum": 0},
    },
    "WWW-Authenticate": {
        "description": "How to send an API key",
        "required": True,
        "schema": const_of("Bearer"),
    },
    "X-Session-Step": {
        "description": "The number of the last answered step of the session",
        "required": True,
        "schema": {"type": "integer", "minimum": 0},
    },
    "X-Session-Expires-In": {
        "description": "Seconds until the session expires without a further step",
        "schema": {"type": "number", "minimum": 0},
    },
    "Location": {
        "description": "The address of the stream or the session",
        "required": True,
        "schema": {**TEXT, "format": "uri-reference"},
    },
}
NEVER_SENT = 499
"""The status for a disconnected client, used only in the log and the metrics."""
REFUSED = (errors.Unauthenticated, errors.Forbidden)
"""Only if the gateway requires API keys."""
ANYWHERE: tuple[type[GatewayError], ...] = (
    errors.InvalidRequest,
    errors.SlowRequest,
    errors.HeadersTooLarge,
    errors.Internal,
)


def operation(
    operation_id: str, tag: str, summary: str, description: str, answers: Schema, *parameters: Schema
) -> Schema:
    described: Schema = {"operationId": operation_id, "summary": summary, "description": description, "tags": [tag]}
    return described | ({"parameters": list(parameters)} if parameters else {}) | {"responses": answers}


def headers(*names: str) -> Schema:
    every = ("X-Request-ID", "Server-Timing", *names)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in every}


def answer(description: str, content: Schema | None = None, *names: str) -> Schema:
    """``names``: the headers in addition to those of every answer."""
    return {"description": description, "headers": headers(*names)} | ({"content": content} if content else {})


def json_answer(description: str, schema: Schema | type, *names: str) -> Schema:
    """``schema``: or the type of the answer, one of those that :func:`schemas_of` gets."""
    content = ref(schema.__name__) if isinstance(schema, type) else schema
    return answer(description, {"application/json": {"schema": content}}, *names)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def schemas_of(*answers: type) -> Schema:
    """The schemas of the types of answers, and of the types in them, by name."""
    _, schemas = msgspec.json.schema_components(answers, ref_template="#/components/schemas/{name}")
    return {name: _always_whole(with_types(schema)) for name, schema in schemas.items()}


def _always_whole(schema: Schema) -> Schema:
    """Requires members that have a default: an answer leaves out only those that are UNSET."""
    del schema["title"]
    if members := schema.get("properties"):
        required = [name for name, each in members.items() if name in schema["required"] or "default" in each]
        schema["required"] = required
        for each in members.values():
            each.pop("default", None)
    return schema


def problems(*possible: type[GatewayError]) -> Schema:
    """The answers for these errors and for the errors that any request can get, by status."""
    return _by_status(*possible, *ANYWHERE)


def _by_status(*possible: type[GatewayError]) -> Schema:
    statuses = {ROW_BY_ERROR[error].status for error in possible}
    return {str(status): {"$ref": f"#/components/responses/Problem{status}"} for status in sorted(statuses)}


def headers_of_errors(found: Sequence[type[GatewayError]]) -> list[str]:
    """The headers that every answer with one of these errors has, beyond those of every answer."""
    names = ["Retry-After"] if all(error.retry_after_s is not None for error in found) else []
    return names + (["WWW-Authenticate"] if list(found) == [errors.Unauthenticated] else [])


def _problem_answer(status: int) -> Schema:
    found = [error for error, row in ROW_BY_ERROR.items() if row.status == status]
    names = headers_of_errors(found)
    content = {"application/problem+json": {"schema": ref(Problem.__name__)}}
    return answer(" ".join(f"`{error.code}`: {ROW_BY_ERROR[error].meaning}" for error in found), content, *names)


REFUSALS = _by_status(*REFUSED)
COMPONENTS: Schema = {
    "schemas": schemas_of(Problem),
    "headers": _HEADERS,
    "responses": {
        f"Problem{status}": _problem_answer(status)
        for status in sorted({row.status for row in ROW_BY_ERROR.values()} - {NEVER_SENT})
    },
}


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
    errors.Draining,
    errors.DeadlineExceeded,
)
IDEMPOTENCY_HEADER: Schema = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
    "description": "A unique key, such as a UUID: a repeated request with the same body gets the first answer again.",
}
TIMEOUT_HEADER: Schema = {
    "name": "X-Request-Timeout",
    "in": "header",
    "schema": {"type": "number", "exclusiveMinimum": 0},
    "description": "Seconds until the deadline. The pipeline's own deadline is the upper limit.",
}
