"""Triton's spans, read from OTLP/JSON as Triton 2.51 exports it. Anyone who reaches the port can send a body.

Triton records a span for each run of a model, with a child ``compute`` for models that are not ensembles, and above
all of them ``InferRequest`` for the gRPC call. The times of the phases are events of these spans.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

CALL = "InferRequest"
COMPUTE = "compute"
MOMENTS = frozenset(
    {
        "QUEUE_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "INFER_RESPONSE_COMPLETE",
    }
)

_Text = Annotated[str, Meta(max_length=256)]
_Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_TraceId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_SpanId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class NotSpans(Exception):
    """The body is not an OTLP/JSON export of traces."""


class TritonSpan(Struct, frozen=True):
    """Times are in nanoseconds since the epoch. ``model`` is empty for spans that are no run of a model.

    ``moments``: the times of events by their names, of each name the first.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    model: str = ""
    version: str = ""
    request_id: str = ""
    moments: dict[str, int] = field(default_factory=dict)


class _Value(Struct):
    string: str | None = field(name="stringValue", default=None)
    integer: int | None = field(name="intValue", default=None)


class _Attribute(Struct):
    key: str
    value: _Value


class _Event(Struct):
    name: str
    time: _Nanoseconds = field(name="timeUnixNano")


class _Span(Struct):
    trace_id: _TraceId = field(name="traceId")
    span_id: _SpanId = field(name="spanId")
    name: _Text
    start: _Nanoseconds = field(name="startTimeUnixNano")
    end: _Nanoseconds = field(name="endTimeUnixNano")
    parent_id: str = field(name="parentSpanId", default="")
    attributes: list[_Attribute] = []
    events: list[_Event] = []


class _Scope(Struct):
    spans: list[_Span] = []


class _Resource(Struct):
    scopes: list[_Scope] = field(name="scopeSpans", default_factory=list)


class _Export(Struct):
    resources: list[_Resource] = field(name="resourceSpans")


_decoder = msgspec.json.Decoder(_Export, strict=False)
"""Not strict, because OTLP/JSON writes 64-bit integers as strings."""


def spans_in(body: bytes | memoryview) -> Iterator[TritonSpan]:
    """The spans of an export; members that are not known are ignored. Raises NotSpans before the first span."""
    try:
        export = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NotSpans from exc
    return (_span_of(span) for each in export.resources for scope in each.scopes for span in scope.spans)


def _span_of(span: _Span) -> TritonSpan:
    known = {each.key.removeprefix("triton."): _text_of(each.value) for each in span.attributes}
    return TritonSpan(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id[:16],
        name=span.name,
        start_ns=span.start,
        end_ns=span.end,
        model=known.get("model_name", ""),
        version=known.get("model_version", ""),
        request_id=known.get("request_id", ""),
        moments={each.name: each.time for each in reversed(span.events) if each.name in MOMENTS},
    )


def _text_of(value: _Value) -> str:
    found: Any = value.string if value.string is not None else value.integer
    return "" if found is None else str(found)[:256]
