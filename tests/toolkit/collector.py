"""An OpenTelemetry collector: takes OTLP over HTTP, protobuf from the gateway and JSON from Triton, and keeps spans."""

import json
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_S = 60.0
_HEX_IDS = ("traceId", "spanId", "parentSpanId")


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    links: tuple[str, ...] = ()
    """The ids of the spans that it links to."""


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    requests: int = 0

    def of(self, trace_id: str, *names: str, count: int = 0, wait_s: float = WAIT_S) -> list[Span]:
        """Returns the trace's spans when the expected names and number have arrived, or all spans after a timeout."""
        ends = time.monotonic() + wait_s
        while time.monotonic() < ends:
            found = [span for span in self.spans if span.trace_id == trace_id]
            if len(found) >= count and set(names) <= {span.name for span in found}:
                break
            time.sleep(0.02)
        return found

    def take(self, body: bytes, content_type: str) -> bytes:
        """The answer, empty in both encodings."""
        self.requests += 1
        if "json" in content_type:
            self.spans += spans_of(json_format.Parse(_with_base64_ids(body), ExportTraceServiceRequest()))
            return b"{}"
        self.spans += spans_of(ExportTraceServiceRequest.FromString(body))
        return ExportTraceServiceResponse().SerializeToString()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        timeout = 1.0

        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            content_type = self.headers["Content-Type"]
            answer = collector.take(self.rfile.read(int(self.headers["Content-Length"])), content_type)
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # waited for at the end, so that no connection is left open
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    _attributes(span.attributes),
                    tuple(link.span_id.hex() for link in span.links),
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


def _with_base64_ids(body: bytes) -> str:
    """OTLP's JSON has its ids in hexadecimal, where protobuf's own has base64."""
    request = json.loads(body)
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                span |= {name: b64encode(bytes.fromhex(span[name])).decode() for name in _HEX_IDS if name in span}
    return json.dumps(request)
