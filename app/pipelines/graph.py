"""The graph of a pipeline: its steps and the tensors between them, computed from the models' configurations.

Ensembles, including nested ones, are replaced by their steps. A BLS model is one step, because its configuration lacks
the calls of its script.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.core.model import ModelConfig, TensorSpec

MAX_STEPS = 300
"""Also bounds the depth. Nested ensembles of two steps double their steps with each level."""


@dataclass(frozen=True, slots=True)
class GraphStep:
    """``name`` is the model's name, with ``#2`` and so on if the model occurs more than once."""

    name: str
    config: ModelConfig
    ensemble: str
    """The innermost ensemble that contains the step; empty if the pipeline's model is not an ensemble."""
    version: str = ""
    """The version that the pipeline or the ensemble requires; empty for the latest version."""
    calls: tuple[ModelConfig, ...] = ()
    """The models that the step's script calls, as far as its configuration declares them."""

    @property
    def model(self) -> str:
        return self.config.name


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """A tensor of a step. ``step`` is None at the edge of the pipeline: a tensor of the request or of the response."""

    step: GraphStep | None
    tensor: TensorSpec


@dataclass(frozen=True, slots=True)
class Edge:
    source: EdgeEnd
    target: EdgeEnd
    name: str
    """The tensor's name in the target's ensemble."""


@dataclass(frozen=True, slots=True)
class Graph:
    """``models`` and ``tensors``: the names of all models that a request uses, and of their inputs and outputs.

    They include ensembles and declared ``bls_calls``. ``ensembles``: the ensembles that Triton may name in an error.
    """

    steps: tuple[GraphStep, ...] = ()
    edges: tuple[Edge, ...] = ()
    models: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    ensembles: frozenset[str] = frozenset()

    def into(self, model: str, tensor: str, ensemble: str = "") -> list[Edge]:
        """Returns the edges into an input of the steps of a model whose source may be at fault.

        An empty ``tensor`` is any input. A tensor of the request is checked before Triton gets it, so it is at fault
        only if it may be missing, or if no step writes to the input.
        """
        edges = [edge for edge in self.edges if _is(edge.target, model, tensor, ensemble)]
        return [edge for edge in edges if edge.source.step is not None or edge.source.tensor.optional] or edges

    def out_of(self, tensor: str, ensemble: str) -> Edge | None:
        """Returns an edge from the only step that has an output of this name."""
        found = [edge for edge in self.edges if edge.source.step and _is(edge.source, "", tensor, ensemble)]
        return found[0] if len({edge.source.step for edge in found}) == 1 else None

    def into_response(self) -> list[Edge]:
        return [edge for edge in self.edges if edge.target.step is None]


def graph_of(config: ModelConfig, models: Mapping[str, ModelConfig], version: str = "") -> Graph:
    """``models``: the models that a request uses, by name. Steps of other models, and above MAX_STEPS, are omitted."""
    steps, edges, left = list[GraphStep](), list[Edge](), MAX_STEPS

    def run(
        config: ModelConfig, given: Mapping[str, tuple[EdgeEnd, str]], ensemble: str, version: str
    ) -> dict[str, EdgeEnd]:
        """Returns the ends that write the model's outputs. ``given``: input -> its source, and the edge's name."""
        nonlocal left
        if not config.is_ensemble:
            places = sum(step.model == config.name for step in steps) + 1
            name = config.name if places == 1 else f"{config.name}#{places}"
            calls = tuple(models[model] for model in config.names_in("bls_calls") if model in models)
            steps.append(step := GraphStep(name, config, ensemble, version, calls))
            for spec in config.inputs:
                if spec.name in given:
                    source, edge_name = given[spec.name]
                    edges.append(Edge(source, EdgeEnd(step, spec), edge_name))
            return {spec.name: EdgeEnd(step, spec) for spec in config.outputs}
        ends = {tensor: end for tensor, (end, _) in given.items()}
        for index in config.runnable_steps(ends):
            if not left:
                break
            left -= 1
            each = config.steps[index]
            child = models.get(each.model)
            inputs = {name: (ends[tensor], tensor) for name, tensor in each.input_map if tensor in ends}
            outputs = run(child, inputs, config.name, each.version) if child is not None else {}
            ends |= {tensor: outputs[name] for name, tensor in each.output_map if name in outputs}
        return ends

    written = run(config, {spec.name: (EdgeEnd(None, spec), spec.name) for spec in config.inputs}, "", version)
    answered = [
        Edge(written[spec.name], EdgeEnd(None, spec), spec.name) for spec in config.outputs if spec.name in written
    ]
    return Graph(
        steps=tuple(steps),
        edges=(*edges, *answered),
        models=frozenset(models),
        tensors=frozenset(spec.name for each in models.values() for spec in (*each.inputs, *each.outputs)),
        ensembles=frozenset(name for name, each in models.items() if each.is_ensemble),
    )


def _is(end: EdgeEnd, model: str, tensor: str, ensemble: str) -> bool:
    """Whether the end is the tensor of a step; an empty name matches any."""
    step = end.step
    return (
        step is not None
        and tensor in ("", end.tensor.name)
        and model in ("", step.model)
        and ensemble in ("", step.ensemble)
    )
