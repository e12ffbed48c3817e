"""The graph of a pipeline in ``GET /v1/pipelines/{pipeline}``: steps, tensors between them, and early exits."""

from collections.abc import Iterable, Iterator
from typing import Any

from app.domain.model import ModelConfig, TensorSpec
from app.pipelines.graph import End, GraphStep
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import EarlyExitRule


def graph_described(pipeline: Pipeline) -> dict[str, Any]:
    """In ``edges``, ``step`` is null for a tensor of the request or of the response."""
    graph = pipeline.graph
    return {
        "steps": [_step(step) for step in graph.steps],
        "edges": [
            {
                "from": _end(edge.source),
                "to": _end(edge.target),
                "tensor": edge.name,
                "datatype": edge.datatype,
                "shape": edge.shape,
            }
            for edge in graph.edges
        ],
        "exits": [
            {"step": step, "reason": rule.reason}
            for rule in pipeline.spec.early_exit
            for step in dict.fromkeys(_exiting(rule, pipeline))
        ],
    }


def _step(step: GraphStep) -> dict[str, Any]:
    return {
        "name": step.name,
        **({"ensemble": step.ensemble} if step.ensemble else {}),
        **_model(step.config, step.version),
        "calls": [_model(config) for config in step.calls],
    }


def _model(config: ModelConfig, version: str = "") -> dict[str, Any]:
    """``version`` is null for the latest version."""
    return {
        "model": config.name,
        "version": version or None,
        "backend": config.backend,
        "decoupled": config.decoupled,
        "max_batch_size": config.max_batch_size,
        "instances": config.instance_count,
        "inputs": _tensors(config.inputs),
        "outputs": _tensors(config.outputs),
    }


def _tensors(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [
        {"name": spec.name, "datatype": spec.datatype, "shape": spec.dims, "optional": spec.optional} for spec in specs
    ]


def _end(end: End) -> dict[str, Any]:
    return {"step": end.step.name if end.step else None, "tensor": end.tensor.name}


def _exiting(rule: EarlyExitRule, pipeline: Pipeline) -> Iterator[str]:
    """The steps that a rule's exit leaves.

    For an ``error`` rule these are the steps whose models declare the reason, or the only step. For the others, the
    steps that write the rule's outputs.
    """
    graph = pipeline.graph
    if rule.error is None:
        outputs = {*(rule.missing or ()), *(rule.empty or ())}
        writers = (edge.source.step for edge in graph.into_response() if edge.target.tensor.name in outputs)
        yield from (step.name for step in writers if step is not None)
    elif len(graph.steps) == 1:
        yield graph.steps[0].name
    else:
        yield from (step.name for step in graph.steps if rule.reason in step.config.early_exits)
