"""Hooks that schemathesis loads: the schemas of stream events, and the expected failures with their reasons."""

import contextlib
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import schemathesis

SHORTEST_S = 30.0
MAX_TEXTS = 32
REFUSED = {400, 422}
"""The statuses of a wrong field, by dialect."""
FILES = (b"image", b"audio")
"""The fields of the reference pipelines that are files."""
UNNAMED = "message"
"""The name that browsers give to an event without a name."""


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Adds ``itemSchema`` of OpenAPI 3.2 for the events of a stream; schemathesis also reads it in 3.1."""
    answers = list(raw_schema["components"]["responses"].values())
    for path in raw_schema["paths"].values():
        for operation in path.values():
            answers += operation["responses"].values()
    for answer in answers:
        for media_type in answer.get("content", {}).values():
            if "x-event-schemas" in media_type:
                media_type["itemSchema"] = _event_schema(media_type["x-event-schemas"])
                del media_type["schema"]
            if "x-event-data" in media_type:
                media_type["itemSchema"] = _chunk_schema(media_type["x-event-data"])
                del media_type["schema"]


def _event_schema(schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "oneOf": [
            {
                "type": "object",
                "required": ["data"] if name == UNNAMED else ["id", "event", "data"],
                "properties": {
                    "id": {"type": "string", "pattern": "^[1-9][0-9]*$"},
                    "event": {"const": name},
                    "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": schema},
                },
            }
            for name, schema in schemas.items()
        ]
    }


def _chunk_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of OpenAI's streams: their events have no id and no name, so readers use ``message``."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, text]}, "event": {"const": UNNAMED}},
        "additionalProperties": False,
    }


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Makes valid deadlines long, valid lists of texts short, and valid idempotency keys unique.

    504 is the correct answer to a short deadline, and bursts of cancellations crash Triton 2.51. The vectors of 2,048
    texts take longer than the timeout of schemathesis. A key that was sent before has the answer of that request.
    """
    texts = case.body.get("input") if isinstance(case.body, dict) else None
    if isinstance(texts, list) and MAX_TEXTS < len(texts) <= 2048:
        case.body["input"] = texts[:MAX_TEXTS]
    key = (case.headers or {}).get("Idempotency-Key", "")
    if isinstance(key, str) and 0 < len(key) <= 200 and key.isascii() and key.isprintable():
        case.headers["Idempotency-Key"] = f"{key}{uuid.uuid4().hex}"
    with contextlib.suppress(TypeError, ValueError, KeyError):
        seconds = float(case.headers["X-Request-Timeout"])
        if seconds > 0:
            case.headers["X-Request-Timeout"] = str(max(seconds, SHORTEST_S))


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Returns whether the failure is unexpected."""
    return not any(is_expected(case, response) for is_expected in EXPECTED.get(type(failure).__name__, ()))


def detail_of(response: Any) -> str:
    """Returns the detail of a problem object or the message of an error in OpenAI's form."""
    text = response.text.removeprefix("data: ")
    try:
        body = json.loads(text)
    except ValueError:
        return text
    error = body.get("error", body.get("detail", ""))
    return str(error["message"] if isinstance(error, dict) else error)


REJECTED: list[tuple[set[int], str]] = [
    # Only the model knows which inputs it accepts: an empty label is a valid string. The status of Triton is 400.
    (REFUSED, r" refused the input\."),
    ({400}, r"' failed\.$"),
    # JSON Schema cannot describe the bytes of an image, and schemathesis does not apply ``contentEncoding``.
    ({422}, r"is not an image|is not base64"),
    # JSON Schema cannot express that the number of elements is the product of the dimensions.
    ({400}, r"Shape does not match true shape|to tensor with proper shape|shape that is not possible"),
    ({400}, r"inference request batch-size must be"),
    # ``generate`` requires exactly one response. The configuration of a model does not give their number.
    ({400}, r"exactly 1 response"),
    # JSON Schema cannot compare two inputs or outputs, nor a member of ``parameters`` with those of its parent.
    ({400}, r" have different batch sizes\.$|' is given twice\.$|already exists in (the )?request"),
    # 1.0 is an integer in JSON Schema; the gateway accepts only integers without a fraction.
    (REFUSED, r"not a decimal number|Expected `int`, got `float`"),
    # The largest valid ``Last-Event-ID`` depends on the stream.
    ({400}, r"Last-Event-ID"),
    # The description of a model does not say that its requests need the parameters of a sequence.
    ({400}, r"must specify a non-zero or non-empty correlation ID"),
]
"""The statuses and details of valid requests that the gateway may refuse, with the reason."""


def is_refused_with_reason(case: Any, response: Any) -> bool:
    detail = detail_of(response)
    return any(response.status_code in statuses and re.search(text, detail) for statuses, text in REJECTED)


def event_id_is_empty(case: Any, response: Any) -> bool:
    """An empty ``Last-Event-ID`` means no id in the standard of EventSource."""
    return (case.headers or {}).get("Last-Event-ID") == ""


def sent_form_is_valid(case: Any, response: Any) -> bool:
    """Schemathesis sometimes records a wrong name of the part, but sends the correct one of ``FILES``."""
    body = response.request.body
    if not isinstance(body, bytes) or "multipart" not in response.request.headers.get("Content-Type", ""):
        return False
    files = sum(body.count(b'form-data; name="%b"; filename=' % name) for name in FILES)
    return body.count(b"form-data; name=") == files == 1


def request_needs_a_session(case: Any, response: Any) -> bool:
    """A POST to a pipeline with sessions is not described: its answer only says how to open a session."""
    return case.path == "/v1/pipelines/listen"


EXPECTED: dict[str, list[Callable[[Any, Any], bool]]] = {
    "RejectedPositiveData": [is_refused_with_reason],
    "AcceptedNegativeData": [event_id_is_empty, sent_form_is_valid],
    "AllowHeaderMismatch": [request_needs_a_session],
    "UnsupportedMethodResponse": [request_needs_a_session],
}
