"""``X-Explain: 1``: keeps what the gateway measured of a request and Triton's spans of it, and answers them as JSON.

Triton 2.51 exports OTLP/JSON: a span for each run of a model, with a child ``compute`` for models that are not
ensembles, and above all of them ``InferRequest`` for the gRPC call. The times of the phases are events of these spans.
Anyone who reaches the port can send a body.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from time import monotonic, time_ns
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers
from starlette.responses import Response

from app.admission.keys import Key
from app.api.bodies import Limits, off_loop, read_json
from app.api.endpoint import Endpoint, EndpointGroup, Found, Layer
from app.api.exchange import Exchange, JsonResponse
from app.api.openapi import TIMEOUT_HEADER, Operation, header, in_path, json_answer
from app.api.probes import forward_spans
from app.core.errors import InvalidJson, Outcome, UnknownRequest
from app.core.inference import StepOutcome, sampled
from app.core.json import TEXT
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline

KEEP_S = 60.0
"""After the end of a request."""
MAX_REQUESTS = 256
MAX_SPANS = 1024
"""For each request. The stream of an ensemble has two for each output and step."""
MAX_ALL_SPANS = 16384
"""About 20 MB."""
MAX_BYTES = 4 * 1024 * 1024
"""Size limit of one export. Triton's largest has 512 spans of less than 1 KB."""

CALL = "InferRequest"
MOMENTS = {
    *("QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    "INFER_RESPONSE_COMPLETE",
}
MAX_TEXT = 256
_Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Ms = Annotated[float, Meta(ge=0)]


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


class _Attribute(Struct):
    key: str
    value: dict[str, Any]


class _Event(Struct, rename="camel"):
    name: str
    time_unix_nano: _Nanoseconds


class TritonSpan(Struct, rename="camel"):
    trace_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    span_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    name: str
    start_time_unix_nano: _Nanoseconds
    end_time_unix_nano: _Nanoseconds
    parent_span_id: str = ""
    attributes: list[_Attribute] = []
    events: list[_Event] = []

    def since(self, started_ns: int) -> ExplainedSpan:
        """The span on the clock of a request. ``started_ns``: since the epoch."""

        def ms(at_ns: int) -> float:
            return round((at_ns - started_ns) / 1e6, 3)

        values = ((each.key, value) for each in self.attributes for value in each.value.values())
        texts = {key: str(value)[:MAX_TEXT] for key, value in values if isinstance(value, str | int)}
        model, version, request = (
            texts.get(f"triton.{key}", "") for key in ("model_name", "model_version", "request_id")
        )
        start_ms, end_ms = ms(self.start_time_unix_nano), ms(self.end_time_unix_nano)
        name, parent = self.name[:MAX_TEXT], self.parent_span_id[:16]
        moments = {each.name: ms(each.time_unix_nano) for each in reversed(self.events) if each.name in MOMENTS}
        return ExplainedSpan(self.span_id, parent, name, model, version, request, start_ms, end_ms, moments)


def spans_in(body: bytes | memoryview) -> list[TritonSpan]:
    """The spans of an export; members that are not known are ignored. Raises InvalidJson."""
    try:
        resources = msgspec.json.decode(body)["resourceSpans"]
        spans = [span for each in resources for scope in each.get("scopeSpans", ()) for span in scope.get("spans", ())]
        return msgspec.convert(spans, list[TritonSpan], strict=False)  # OTLP/JSON has 64-bit integers as strings
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError) as exc:
        raise InvalidJson("The body is not an OTLP/JSON export of traces.") from exc


class ExplainedStep(Struct):
    """A step that the gateway ran or skipped, from the start of its first run to the end of its last one."""

    name: str
    outcome: StepOutcome
    start_ms: float
    end_ms: float
    total_ms: Annotated[_Ms, Meta(description="Of all runs: a step behind a stream runs for each response")]


class Explanation(Struct):
    """Times are milliseconds since the gateway received the request."""

    request_id: str
    pipeline: str
    outcome: Annotated[Outcome | None, Meta(description="null while the request runs")] = None
    early_exit: str | None = None
    error: str | None = None
    failed_model: Annotated[str | None, Meta(description="The model or the step that the error names")] = None
    status: int | None = None
    total_ms: _Ms | None = None
    shared_with: Annotated[int, Meta(ge=0, description="Other requests in the same call to Triton")] = 0
    gateway: Annotated[dict[str, _Ms], Meta(description="Phases in order: read, queue, triton, respond")] = {}
    steps: Annotated[list[ExplainedStep], Meta(description="Those that the gateway runs itself")] = []
    spans: list[ExplainedSpan] = []
    dropped: Annotated[int, Meta(ge=0, description="Spans over the limit")] = 0
    is_complete: Annotated[bool, Meta(description="If false, ask again: Triton's spans arrive later")] = False


class Explained(Struct, eq=False):
    """A kept request. ``started_ns``: since the epoch. ``spans``: all of its trace, which may have other requests."""

    answer: Explanation
    trace_id: str
    started_ns: int
    until: float = inf
    spans: dict[str, ExplainedSpan] = {}
    triton_request_id: str = ""
    calls: int = 0
    """Of Triton; 0 while the request runs."""

    def end(self, record: RequestRecord) -> None:
        answer, error, steps = self.answer, record.error, record.steps
        answer.outcome, answer.status, answer.early_exit = record.outcome, record.status, record.early_exit
        if error is not None:
            answer.error, answer.failed_model = error.code, error.failed_step or None
        answer.total_ms, answer.gateway = round(record.total_s * 1e3, 3), record.phases_ms(record.total_s)
        answer.shared_with = 0 if record.sent_as is None else record.sent_as.notes.get("shared_with", 0)
        for name, each in steps.steps.items() if steps else ():
            seconds = each.started - record.started, each.ended - record.started, each.seconds
            answer.steps.append(ExplainedStep(name, each.outcome, *(round(each_s * 1e3, 3) for each_s in seconds)))
        if record.triton_at:
            self.triton_request_id, self.calls = record.triton_request_id, steps.calls if steps else 1
        answer.is_complete = not self.calls
        self.until = monotonic() + KEEP_S

    def explanation(self) -> Explanation:
        """Triton exports spans as they end: all have arrived if each has the one above it, up to the call."""
        answer, spans = self.answer, self.spans.values()
        if self.calls:
            # The spans of its calls, and all below them: a script may give its calls other ids.
            runs = [span for span in spans if span.request_id.partition(".")[0] == self.triton_request_id]
            found = {each for run in runs for each in (run.parent, run.id)}
            while below := {span.id for span in spans if span.parent in found} - found:
                found |= below
            answer.spans = own = [span for span in spans if span.id in found]
            has_calls = sum(span.name == CALL for span in own) >= self.calls
            answer.is_complete = has_calls and all(span.name == CALL or span.parent in self.spans for span in own)
        return answer


class Explanations(Layer):
    """The newest explained requests, by the owner and the request's id. The oldest make room for new ones.

    An owner, the id of a key, finds only own requests, because the caller chooses the id of a request.
    """

    headers = ("X-Explain",)
    flags: ClassVar = {"PipelineList": {"may_explain": "Whether this caller may send `X-Explain`"}}

    def __init__(self, *, is_on: bool, for_everyone: bool, collector_url: str | None = None) -> None:
        """``for_everyone``: whether every caller may explain, not only the keys with ``explain: true``.

        ``collector_url``: also gets every export of Triton unchanged, because Triton has one address for its spans.
        """
        self.is_on = is_on
        self.for_everyone = for_everyone
        self.collector_url = collector_url
        self.kept: dict[tuple[str, str], Explained] = {}
        endpoint = Endpoint("GET", "/v1/requests/{id}/explain", self.explain, _OPERATION)
        self.groups = [EndpointGroup([endpoint], lambda _visible: {"requests": "Where the time of requests went"})]
        if is_on:
            self.admin_endpoints, self.admitted = [Endpoint("POST", "/v1/traces", self.receive)], self.begin

    def described(self, endpoint: Endpoint, operation: Operation) -> Operation:
        if endpoint.method == "POST" and endpoint.path.startswith("/v1/") and TIMEOUT_HEADER in operation.parameters:
            return replace(operation, parameters=[*operation.parameters, _HEADER])
        return operation

    def flags_for(self, key: Key) -> dict[str, bool]:
        return {"may_explain": self.allows(key)}

    def allows(self, key: Key) -> bool:
        return self.is_on and (self.for_everyone or key.explain)

    def begin(self, exchange: Exchange, pipeline: Pipeline) -> None:
        """Traces the request if it asks for it and its caller may explain; otherwise ignores the header."""
        if exchange.header(b"x-explain") != "1" or not self.allows(exchange.key):
            return
        record = exchange.record
        record.trace = trace = sampled(record.trace)
        started_ns = time_ns() - round(record.duration_s * 1e9)
        request = Explained(Explanation(record.request_id, pipeline.name), trace.trace_id, started_ns)
        self.keep(exchange.key.id, request)
        record.on_end = request.end

    def keep(self, owner: str, request: Explained) -> None:
        """Replaces a request with the same id."""
        self.kept.pop((owner, request.answer.request_id), None)
        kept = self.current()
        while len(kept) >= MAX_REQUESTS or sum(len(each.spans) for each in kept.values()) > MAX_ALL_SPANS - MAX_SPANS:
            del kept[next(iter(kept))]
        self.kept[owner, request.answer.request_id] = request

    def current(self) -> dict[tuple[str, str], Explained]:
        now = monotonic()
        for key in [key for key, request in self.kept.items() if request.until <= now]:
            del self.kept[key]
        return self.kept

    def add(self, spans: Iterable[TritonSpan]) -> None:
        """Keeps the spans of explained requests, and ignores all others."""
        by_trace: dict[str, list[Explained]] = {}
        for request in self.current().values():
            by_trace.setdefault(request.trace_id, []).append(request)
        room = MAX_ALL_SPANS - sum(len(request.spans) for request in self.kept.values())
        for span in spans:
            for request in by_trace.get(span.trace_id, ()):
                if len(request.spans) < MAX_SPANS and room > 0:
                    request.spans[span.span_id] = span.since(request.started_ns)
                    room -= 1
                else:
                    request.answer.dropped += 1

    async def explain(self, exchange: Exchange, found: Found) -> Response:
        """Where the time of a request went.

        The phases in the gateway and Triton's spans of a recent request that had `X-Explain: 1`.
        """
        request = self.current().get((exchange.key.id, found["id"]))
        if request is None:
            hint = "Send the request again with `X-Explain: 1` and a key that may explain, and ask within a minute."
            off = "This gateway explains no requests: for development, set GATEWAY_EXPLAIN=true."
            raise UnknownRequest("No explained request of this caller has this id.", hint=hint if self.is_on else off)
        return JsonResponse(request.explanation())

    async def receive(self, exchange: Exchange, _found: Found) -> Response:
        """Triton waits for the answer before its next export, so there are never many at the same time."""
        body = await read_json(exchange, Limits(MAX_BYTES, 8 * MAX_BYTES))
        if self.current():
            self.add(await off_loop(spans_in, body, exchange))
        if self.collector_url is not None:
            await forward_spans(self.collector_url, bytes(body), Headers(scope=exchange.scope))
        return JsonResponse({})


_OPERATION = Operation(
    "explain_request",
    "requests",
    {200: json_answer("The explanation", Explanation)},
    (UnknownRequest,),
    [in_path("id", TEXT) | {"description": "The `X-Request-ID` of the answer"}],
)
_HEADER = header(
    "X-Explain",
    {"type": "string", "examples": ["1"]},
    "`1`: trace this request, so that it can be explained. Other values have no effect, and neither has `1` of callers "
    "that may not explain.",
)
