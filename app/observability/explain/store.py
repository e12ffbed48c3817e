"""Keeps explained requests and their spans for a minute, within limits."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from app.observability.explain.request import ExplainedRequest, Found
from app.observability.explain.spans import TritonSpan

KEEP_S = 60.0
"""After the end of a request."""
LONGEST_S = 900.0
"""After the beginning of a request whose end is not reported because nothing ends it."""
MAX_REQUESTS = 256
MAX_SPANS = 1024
"""For each trace. The stream of an ensemble has two for each output and step."""
MAX_ALL_SPANS = 16384
"""About 20 MB."""


@dataclass(slots=True)
class _Trace:
    requests: int = 0
    spans: list[TritonSpan] = field(default_factory=list)
    dropped: int = 0


@dataclass(slots=True)
class _Kept:
    request: ExplainedRequest
    until: float


class ExplainStore:
    """The oldest requests make room for new ones.

    An owner finds only own requests, because the caller chooses the id of a request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._traces: dict[str, _Trace] = {}
        self._spans = 0

    def wants_spans(self) -> bool:
        """Whether there is a request whose spans may still come."""
        self._forget_expired()
        return bool(self._traces)

    def put(self, request: ExplainedRequest) -> None:
        """Adds a request, or replaces what is known of it."""
        key = request.owner, request.request_id
        known = self._kept.get(key)
        if known is not None and known.request.trace_id == request.trace_id and known.request.ended is None:
            known.request, known.until = request, self._until(request)
            return
        if known is not None:
            self._forget(key)
        self._make_room()
        self._kept[key] = _Kept(request, self._until(request))
        self._traces.setdefault(request.trace_id, _Trace()).requests += 1

    def find(self, owner: str, request_id: str) -> Found | None:
        """None if the request was not explained, is forgotten, or belongs to another owner."""
        self._forget_expired()
        kept = self._kept.get((owner, request_id))
        if kept is None:
            return None
        trace = self._traces[kept.request.trace_id]
        return Found(kept.request, tuple(trace.spans), trace.dropped)

    def add(self, spans: Iterable[TritonSpan]) -> None:
        """Keeps the spans of explained requests, and ignores all others."""
        for span in spans:
            trace = self._traces.get(span.trace_id)
            if trace is None:
                continue
            if len(trace.spans) >= MAX_SPANS or self._spans >= MAX_ALL_SPANS:
                trace.dropped += 1
                continue
            trace.spans.append(span)
            self._spans += 1

    def _until(self, request: ExplainedRequest) -> float:
        return self._clock() + (LONGEST_S if request.ended is None else KEEP_S)

    def _make_room(self) -> None:
        self._forget_expired()
        while self._kept and (len(self._kept) >= MAX_REQUESTS or self._spans > MAX_ALL_SPANS - MAX_SPANS):
            self._forget(next(iter(self._kept)))

    def _forget_expired(self) -> None:
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.until <= now]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        trace_id = self._kept.pop(key).request.trace_id
        trace = self._traces[trace_id]
        trace.requests -= 1
        if not trace.requests:
            self._spans -= len(self._traces.pop(trace_id).spans)
