"""Triton's spans, read from OTLP/JSON as Triton 2.51 exports it. Anyone who reaches the port can send a body.

Triton records a span for each run of a model, with a child ``compute`` for models that are not ensembles, and above
all of them ``InferRequest`` for the gRPC call. The times of the phases are events of these spans.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from app.core.errors import InvalidJson

CALL = "InferRequest"
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
MOMENTS = {"QUEUE_START", *_COMPUTE, "INFER_RESPONSE_COMPLETE"}
_ATTRIBUTES = ("model_name", "model_version", "request_id")
MAX_TEXT = 256

_Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_TraceId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_SpanId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class ExplainedSpan(Struct):
    """A span of Triton, in milliseconds of its request. It lies outside of the request if Triton's clock differs."""

    id: str
    parent: str
    name: str
    model: Annotated[str, Meta(description="Empty for a span that is not a run of a model")]
    version: str
    request_id: str
    start_ms: float
    end_ms: float
    moments: Annotated[dict[str, float], Meta(description="The first event of each name")]


class _Value(Struct):
    string: str | None = field(name="stringValue", default=None)
    integer: int | None = field(name="intValue", default=None)


class _Attribute(Struct):
    key: str
    value: _Value


class _Event(Struct):
    name: str
    time: _Nanoseconds = field(name="timeUnixNano")


class TritonSpan(Struct):
    trace_id: _TraceId = field(name="traceId")
    span_id: _SpanId = field(name="spanId")
    name: str
    start: _Nanoseconds = field(name="startTimeUnixNano")
    end: _Nanoseconds = field(name="endTimeUnixNano")
    parent_id: str = field(name="parentSpanId", default="")
    attributes: list[_Attribute] = []
    events: list[_Event] = []

    def since(self, started_ns: int) -> ExplainedSpan:
        """The span on the clock of a request. ``started_ns``: since the epoch."""

        def ms(at_ns: int) -> float:
            return round((at_ns - started_ns) / 1e6, 3)

        texts = {each.key: str(each.value.string or each.value.integer or "")[:MAX_TEXT] for each in self.attributes}
        model, version, request_id = (texts.get(f"triton.{name}", "") for name in _ATTRIBUTES)
        parent, name, start_ms, end_ms = self.parent_id[:16], self.name[:MAX_TEXT], ms(self.start), ms(self.end)
        moments = {each.name: ms(each.time) for each in reversed(self.events) if each.name in MOMENTS}
        return ExplainedSpan(self.span_id, parent, name, model, version, request_id, start_ms, end_ms, moments)


class _Scope(Struct):
    spans: list[TritonSpan] = []


class _Resource(Struct):
    scopes: list[_Scope] = field(name="scopeSpans", default_factory=list)


class _Export(Struct):
    resources: list[_Resource] = field(name="resourceSpans")


_decoder = msgspec.json.Decoder(_Export, strict=False)
"""Not strict, because OTLP/JSON writes 64-bit integers as strings."""


def spans_in(body: bytes | memoryview) -> list[TritonSpan]:
    """The spans of an export; members that are not known are ignored. Raises InvalidJson."""
    try:
        export = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidJson("The body is not an OTLP/JSON export of traces.") from exc
    return [span for each in export.resources for scope in each.scopes for span in scope.spans]
