"""One row for each error: its HTTP status, its meaning, and what to do about it; and errors as answers (RFC 9457).

This is the only place that knows HTTP statuses of errors. ``/docs/errors`` and docs/reference/errors.md show the same
rows.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import orjson
from msgspec import Meta
from starlette.responses import Response

from app.core import errors
from app.core.errors import GatewayError
from app.core.text import shown


class ErrorRow(NamedTuple):
    status: int
    meaning: str
    remedy: str
    is_of_replica: bool = False
    """Whether another replica may answer the same request: then the connection is closed, also after a stream."""
    headers: Callable[[Any], Mapping[str, str]] = lambda _error: {}
    """Further headers of the answer."""


ROW_BY_ERROR: dict[type[GatewayError], ErrorRow] = {
    errors.InvalidJson: ErrorRow(
        400, "The gateway cannot read the body as JSON.", "Check the quoting. Send the body as UTF-8."
    ),
    errors.InvalidRequest: ErrorRow(
        400, "The request is malformed, and no single field is the cause.", "Read `detail` for the cause."
    ),
    errors.ContextLengthExceeded: ErrorRow(
        400,
        "The prompt, or the prompt and the tokens that the model may write, are longer than the model's context.",
        "Shorten the prompt or the conversation, or ask for fewer tokens.",
    ),
    errors.Unauthenticated: ErrorRow(
        401,
        "The gateway asks for an API key, and the request has none, or the key is unknown or has expired.",
        "Send `Authorization: Bearer <key>` or `X-API-Key: <key>`.",
        headers=lambda _: {"WWW-Authenticate": "Bearer"},
    ),
    errors.Forbidden: ErrorRow(
        403,
        "The API key is valid, but does not allow this pipeline, model, dialect or stream.",
        "Use another key, or have the scope of this key changed.",
    ),
    errors.UnknownPipeline: ErrorRow(404, "No pipeline has this name.", "GET /v1/pipelines lists the pipelines."),
    errors.UnknownExample: ErrorRow(
        404,
        "The pipeline has no example with this name, or the example cannot be sent: a file is missing or too large.",
        "GET /v1/pipelines/{pipeline} lists the examples. `triton-gateway check` checks their files.",
    ),
    errors.UnknownModel: ErrorRow(
        404,
        "No model has this name and version, or the gateway does not serve it under /v2.",
        "POST /v2/repository/index lists the models. The key `oip` of gateway.yaml adds models.",
    ),
    errors.NotFound: ErrorRow(404, "The gateway serves nothing at this address.", "GET /docs lists the addresses."),
    errors.UnknownStream: ErrorRow(
        404, "No stream has this id, or the stream has expired.", "Start a stream with POST /v1/streams."
    ),
    errors.UnknownRequest: ErrorRow(
        404,
        "No request with this id was traced for this caller, or its trace has expired.",
        "Send the request again as `hint` says.",
    ),
    errors.MethodNotAllowed: ErrorRow(
        405, "This address does not accept this method.", "Use a method that the Allow header lists."
    ),
    errors.SlowRequest: ErrorRow(
        408, "The headers or the body took too long to arrive.", "Send the whole request without pauses."
    ),
    errors.StreamEvicted: ErrorRow(
        410,
        "The stream no longer stores the events after this Last-Event-ID, or was dropped after its end because newer "
        "streams needed its memory.",
        "Start a new stream. Resume earlier, ask the model for larger outputs, or raise GATEWAY_MAX_KEPT_BYTES.",
    ),
    errors.PayloadTooLarge: ErrorRow(
        413,
        "The body is larger than the limit.",
        "Send less, or raise GATEWAY_MAX_BODY_BYTES or `limits.body_bytes` of the pipeline. The tensors of one request "
        "may have 64 MiB.",
    ),
    errors.UnsupportedMediaType: ErrorRow(
        415,
        "The pipeline does not accept this content type, or the body has a Content-Encoding.",
        "Send application/json, or, where an input is a file, multipart/form-data or the file's own type.",
    ),
    errors.InvalidInput: ErrorRow(
        422,
        "A field is missing, unknown, out of range, or has the wrong type or shape.",
        "The list `errors` names each field. GET /v1/pipelines/{pipeline} describes the fields.",
    ),
    errors.UpgradeRequired: ErrorRow(
        426,
        "The address is a WebSocket, and the request does not open one.",
        "Use a WebSocket client. Behind a proxy, let the proxy pass on the headers Upgrade and Connection.",
        headers=lambda _: {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"},
    ),
    errors.TooManyRequests: ErrorRow(
        429,
        "More requests came than the model can answer, or the gateway has reached its memory limit for request bodies.",
        "Retry after the number of seconds in Retry-After.",
    ),
    errors.HeadersTooLarge: ErrorRow(
        431, "The request line and the headers are larger than the limit.", "Send fewer or shorter headers."
    ),
    errors.ClientClosedRequest: ErrorRow(
        499, "The client disconnected before the answer.", "Nothing to do: only the log and the metrics show this code."
    ),
    errors.StreamCancelled: ErrorRow(
        499,
        "The stream was cancelled before it was complete: by DELETE, or because no client read it.",
        "Nothing to do after DELETE. If no client read the stream, start a new one and read it, or raise resume_s.",
    ),
    errors.SlowConsumer: ErrorRow(
        499,
        "The client reads its stream too slowly.",
        "Read faster, raise the pipeline's lag_s, or ask the model for larger outputs.",
    ),
    errors.Internal: ErrorRow(
        500, "The gateway has a bug.", "Report the bug with the request id and the lines of the log."
    ),
    errors.ResumableStreamsOff: ErrorRow(
        501,
        "The gateway has several workers and no Redis, so it keeps no resumable streams.",
        "Use POST /v1/pipelines/{pipeline}/stream, or set GATEWAY_REDIS_URL.",
    ),
    errors.ModelError: ErrorRow(
        502, "The model failed.", "Read Triton's log and the gateway's log: both show the cause."
    ),
    errors.ContractViolation: ErrorRow(
        502,
        "The type, shape or size of a tensor differs from its declaration or its contract.",
        "Correct the model that writes the tensor. `detail` names the tensor, the actual shape and the agreed one.",
    ),
    errors.UpstreamProtocol: ErrorRow(
        502, "Triton's answer does not follow its protocol.", "Check Triton's version and its log."
    ),
    errors.ToolCallMissing: ErrorRow(
        502,
        "`tool_choice` requires a call of a function, and the model's answer has none, or one without valid arguments.",
        "Retry, or improve the prompt. Check that `openai: tools` names the format in which the model writes calls.",
    ),
    errors.FormatMismatch: ErrorRow(
        502,
        "`response_format` requires JSON, and the model's answer is none, or does not fit the schema.",
        "Retry, or describe the format in the prompt. `openai: guided` lets a backend that can hold the model to it.",
    ),
    errors.UpstreamUnavailable: ErrorRow(
        503,
        "Triton does not answer.",
        "Retry after the number of seconds in Retry-After. GET /health/ready shows the state of Triton.",
        is_of_replica=True,
    ),
    errors.ModelNotReady: ErrorRow(
        503,
        "The pipeline's model is not loaded, its engine has died, or its first run is not finished.",
        "Retry after the number of seconds in Retry-After. GET /health/ready shows the state of the pipeline.",
        is_of_replica=True,
    ),
    errors.ModelChanged: ErrorRow(
        503,
        "The parts of a request with many items were answered by different versions of the model.",
        "Retry. If several Tritons have different versions, set `version` of the pipeline.",
    ),
    errors.Draining: ErrorRow(
        503, "The gateway is shutting down.", "Retry: another replica can answer.", is_of_replica=True
    ),
    errors.DeadlineExceeded: ErrorRow(
        504,
        "The model did not answer before the deadline, or a stream was silent for too long.",
        "Raise the pipeline's timeout_s, first_output_s or progress_s, or X-Request-Timeout up to these.",
    ),
}


def lenient_status_of(kind: type[GatewayError]) -> int:
    """The status in the dialects that others define: they have no 422."""
    return 400 if kind is errors.InvalidInput else ROW_BY_ERROR[kind].status


def headers_of(error: GatewayError) -> dict[str, str]:
    """The headers of an answer with this error, in every dialect."""
    row = ROW_BY_ERROR[type(error)]
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    headers.update(row.headers(error))
    if row.is_of_replica:
        headers["Connection"] = "close"
    return headers


ERROR_BY_CODE: dict[str, type[GatewayError]] = {}
CODES: list[str] = []
"""The keys of ``ERROR_BY_CODE``."""


def add_rows(rows: Mapping[type[GatewayError], ErrorRow]) -> None:
    """Adds the errors of a layer."""
    ROW_BY_ERROR.update(rows)
    ERROR_BY_CODE.update({error.code: error for error in rows})
    CODES.extend(error.code for error in rows)


add_rows(ROW_BY_ERROR)


MEDIA_TYPE = "application/problem+json"
MAX_BYTES = 4096
_MAX_TEXT = 512
_MAX_ITEM = 96
_MAX_ITEMS = 8


class ProblemField(TypedDict):
    field: str
    problem: str


class Problem(TypedDict):
    """An error, as RFC 9457 describes it."""

    type: Annotated[
        str, Meta(description="The address of the page about this code", extra_json_schema={"format": "uri-reference"})
    ]
    title: str
    status: int
    detail: str
    code: Annotated[str, Meta(extra_json_schema={"enum": CODES})]
    request_id: str
    retryable: bool
    hint: NotRequired[str]
    errors: NotRequired[Annotated[list[ProblemField], Meta(max_length=_MAX_ITEMS)]]


def status_of(error: GatewayError) -> int:
    return ROW_BY_ERROR[type(error)].status


def problem_of(error: GatewayError, request_id: str) -> Problem:
    """The problem object. Its JSON has at most MAX_BYTES bytes."""
    problem: Problem = {
        "type": f"/docs/errors/{error.code}",
        "title": error.title,
        "status": status_of(error),
        "detail": _cut(error.detail, _MAX_TEXT),
        "code": error.code,
        "request_id": request_id,
        "retryable": error.retryable,
    }
    if error.errors:
        problem["errors"] = [
            {"field": _cut(found.field, _MAX_ITEM), "problem": _cut(found.problem, _MAX_ITEM)}
            for found in error.errors[:_MAX_ITEMS]
        ]
    if error.hint:
        problem["hint"] = _cut(error.hint, _MAX_TEXT)
    while problem.get("errors") and len(orjson.dumps(problem)) > MAX_BYTES:
        problem["errors"].pop()
    return problem


def _cut(text: str, size: int) -> str:
    """Cuts a text to at most ``size`` bytes of UTF-8 and removes control characters."""
    return shown(text, size).encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


ErrorForm = Callable[[GatewayError, str], Response]
"""Maps an error and the request's id to the answer."""


def problem_response(error: GatewayError, request_id: str) -> Response:
    return Response(orjson.dumps(problem_of(error, request_id)), status_of(error), headers_of(error), MEDIA_TYPE)
