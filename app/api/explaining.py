"""``X-Explain: 1``: which requests are explained, and what the gateway reports of them."""

import secrets
import time
from dataclasses import dataclass

from app.admission.keys import Key
from app.api.exchange import Exchange
from app.core.trace import SAMPLED, TraceContext
from app.observability.explain.request import ExplainedRequest, ExplainedStep, Plan
from app.observability.explain.store import ExplainStore
from app.observability.record import OpenExplanation
from app.pipelines.graph import Graph
from app.pipelines.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Explaining:
    """``for_everyone``: whether every caller may explain, not only the keys with ``explain: true``."""

    explanations: ExplainStore
    for_everyone: bool

    def allows(self, key: Key | None) -> bool:
        return self.for_everyone or (key is not None and key.explain)

    def begin(self, exchange: Exchange, pipeline: Pipeline) -> None:
        """Traces the request if its caller may explain; otherwise ignores the header."""
        if not self.allows(exchange.key):
            return
        record = exchange.record
        record.trace = sampled(record.trace)
        since_s = time.perf_counter() - record.started
        request = ExplainedRequest(
            request_id=record.request_id,
            owner=exchange.caller.id,
            trace_id=record.trace.trace_id,
            started_ns=time.time_ns() - round(since_s * 1e9),
            plan=plan_of(pipeline),
        )
        record.explanation = OpenExplanation(self.explanations, request)
        self.explanations.put(request)


def sampled(trace: TraceContext | None) -> TraceContext:
    """A context that Triton records: the request's own if it is sampled, otherwise another span of the same trace."""
    if trace is None:
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8), SAMPLED)
    if trace.is_sampled:
        return trace
    return TraceContext(trace.trace_id, secrets.token_hex(8), trace.flags | SAMPLED, trace.state)


def plan_of(pipeline: Pipeline) -> Plan:
    graph = pipeline.graph
    return Plan(
        pipeline=pipeline.name,
        model=pipeline.spec.model,
        steps=tuple(ExplainedStep(step.name, step.model, step.ensemble, step.decoupled) for step in graph.steps),
        next_steps=_next_steps(graph),
        ensembles=graph.ensembles,
        calls=graph.models - graph.ensembles - {step.model for step in graph.steps},
    )


def _next_steps(graph: Graph) -> frozenset[tuple[str, str]]:
    ends = ((edge.source.step, edge.target.step) for edge in graph.edges)
    return frozenset((source.name, target.name) for source, target in ends if source and target)
