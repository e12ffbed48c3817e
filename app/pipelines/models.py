"""Queries Triton about the models of the pipelines: each model once, all of them concurrently.

The models that callers can address directly by name, under ``/v2``. The graph of a pipeline: its steps and the tensors
between them, computed from the models' configurations. In it, ensembles, including nested ones, are replaced by their
steps. A BLS model is one step, because its configuration lacks the calls of its script.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.core.engine import Document, InferenceServer, PipelineLayer
from app.core.errors import GatewayError, ModelNotReady, UnknownModel
from app.core.inference import BYTES
from app.core.model import (
    ModelConfig,
    ModelKey,
    ModelState,
    OwnIds,
    TensorSpec,
    reached,
    walk,
)
from app.core.text import nearest, nearest_of
from app.pipelines.spec import STREAM_DEFAULTS, PipelineSpec, StreamSpec
from app.steps.plan import VERSION

Answer = ModelConfig | Exception

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a model is not there.

    ``detail`` is for callers. ``problem`` is for the log; it is empty while Triton does not answer, which is no fault
    of the model. ``unexpected`` is an exception that the engine does not declare.
    """

    detail: str
    problem: str = ""
    unexpected: Exception | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    is_up: bool = False
    index: Mapping[str, ModelState] = field(default_factory=dict)
    answers: Mapping[ModelKey, Answer] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    """Model -> why it is not ready although Triton has loaded it, as a clause."""

    def models_of(self, *called: ModelKey) -> dict[str, ModelConfig] | Missing:
        """The models that requests to these run through, each of these before those below it.

        Of the models that a BLS model declares, those that are ready.
        """
        found: dict[str, ModelConfig] = {}
        for model, version in called:
            required, lacking = {model}, list[tuple[str, Answer | None, str, str]]()
            for name in walk([model], lambda name: found[name].calls if name in found else ()):
                wanted, caller = (version, "") if name == model else ("", f", which '{model}' runs")
                answer = self.answers.get((name, wanted))
                if isinstance(answer, ModelConfig):
                    found[name] = answer
                    required.update(step.model for step in answer.steps)
                else:
                    lacking.append((name, answer, wanted, caller))
            for name, answer, wanted, caller in lacking:
                if name in required or not isinstance(answer, ModelNotReady):
                    return self._missing(name, answer, wanted, caller)
        return found

    def _missing(self, name: str, answer: "Answer | None", version: str, step: str) -> Missing:
        named, state, fault = f"'{name}'{step}", self.index.get(name), self.faults.get(name)
        problem, unexpected = "", None
        if not self.is_up:
            detail = "Triton does not answer."
        elif answer is None:
            detail = "Its model has not been seen yet."  # added to the file after the query
        elif isinstance(answer, GatewayError) and not isinstance(answer, ModelNotReady):
            detail = f"Triton does not answer for model {named}."
        elif not isinstance(answer, ModelNotReady):
            detail, problem = f"The configuration of model {named} cannot be read.", f"'{name}': {answer!r}"
            unexpected = answer if isinstance(answer, Exception) else None
        elif state is None:
            near = nearest_of(name, self.index)
            detail = f"Triton has no model {named}" + (f"; did you mean '{near}'?" if near else ".")
            problem = f"{named} is not a model in Triton's repository{nearest(name, list(self.index))}"
        elif fault:
            detail, problem = f"Model {named} does not work: {fault}.", f"{named} is loaded, but {fault}"
        elif state.ready and not version:
            detail, problem = f"Model {named} does not answer.", f"{named} is loaded and does not answer"
        else:
            reason = f"; Triton says: {state.reason}" if state.reason else ""
            detail = f"Triton has not loaded {f'version {version} of ' if version else ''}model {named}."
            problem = f"{named} is not loaded{f' in version {version}' if version else ''}{reason}"
        return Missing(detail, problem, unexpected)


async def look_up(
    engine: InferenceServer, wanted: Iterable[ModelKey], index: Mapping[str, ModelState] | None
) -> Lookup:
    """Asks a Triton that is up. ``index`` None: the repository index is read only if a model is not ready."""
    answers: dict[ModelKey, Answer] = {}
    keys = sorted(set(wanted))
    while keys:
        found = await asyncio.gather(*(_ask(engine, *key) for key in keys))
        answers |= zip(keys, found, strict=True)
        calls = {(name, "") for config in found if isinstance(config, ModelConfig) for name in config.calls}
        keys = sorted(calls - answers.keys())
    if index is None and any(isinstance(answer, ModelNotReady) for answer in answers.values()):
        index = await read_index(engine)
    unready = {name for (name, _), answer in answers.items() if isinstance(answer, ModelNotReady)}
    faults = {name: fault for name in unready if (fault := engine.fault(name))}
    return Lookup(is_up=True, index=index or {}, answers=answers, faults=faults)


async def read_index(engine: InferenceServer) -> dict[str, ModelState] | None:
    """Returns the models by name; of several versions, a ready one. None if Triton does not answer."""
    try:
        states = await engine.models()
    except GatewayError as exc:
        _log.warning("Triton's models could not be listed: %s", exc.detail)
        return None
    return {state.name: state for state in sorted(states, key=lambda state: state.ready)}


async def _ask(engine: InferenceServer, model: str, version: str) -> Answer:
    try:
        if not await engine.model_ready(model, version):
            return ModelNotReady(f"Triton has no ready model '{model}'.")
        return await engine.model_config(model, version)
    except Exception as exc:
        return exc


@dataclass(frozen=True, slots=True)
class OipModel:
    """A model that callers address by its own name.

    ``models``: those that its requests run through, by name. ``spec``: what the pipelines over it declare for it.
    ``reserved``: the sequence ids that the gateway makes itself for these models.
    """

    config: ModelConfig
    models: Mapping[str, ModelConfig]
    spec: PipelineSpec
    reserved: frozenset[OwnIds]

    @property
    def layers(self) -> tuple[PipelineLayer, ...]:
        """The layer that makes it of Triton's models; empty for one of these."""
        return (self.config,) if isinstance(self.config, PipelineLayer) else ()

    def document(self, document: Document) -> dict[str, Any]:
        """The document in Triton's form, without statistics, of a model that is not one of Triton's."""
        config, is_config = self.config, document == "config"
        if document == "stats":
            return {"model_stats": []}

        def described(each: TensorSpec) -> dict[str, Any]:
            if not is_config:
                return {"name": each.name, "datatype": each.datatype, "shape": each.dims}
            datatype = "STRING" if each.datatype == BYTES else each.datatype
            return {"name": each.name, "data_type": f"TYPE_{datatype}", "dims": each.dims, "optional": each.optional}

        inputs, outputs = ([described(each) for each in specs] for specs in (config.inputs, config.outputs))
        known: dict[str, Any] = {"name": config.name, "platform": config.backend}
        if not is_config:
            return known | {"versions": [VERSION], "inputs": inputs, "outputs": outputs}
        known |= {"backend": config.backend, "max_batch_size": config.max_batch_size, "input": inputs}
        return known | {"output": outputs, "model_transaction_policy": {"decoupled": config.decoupled}}


STREAM_OF_MODEL = StreamSpec(commit_s=2 * STREAM_DEFAULTS.timeout_s)
"""The status of a stream under ``/v2`` is that of its first output: ``commit_s`` is above ``timeout_s``."""


class OipModels:
    """All exposed models as they were last known."""

    def __init__(self) -> None:
        self._models: dict[str, OipModel | None] = {}
        self.in_flight: Mapping[str, int] = {}
        """Model -> the largest ``limits.in_flight`` of its pipelines. A new object if one has changed."""
        self._specs: Sequence[PipelineSpec] = ()
        self._own_ids: dict[ModelKey, tuple[OwnIds, frozenset[str]]] = {}
        """The ids of the sequences that the gateway makes, and the stateful models that have these sequences."""

    @property
    def names(self) -> list[str]:
        return list(self._models)

    @property
    def configs(self) -> list[ModelConfig]:
        """The known configurations."""
        return [known.config for known in self._models.values() if known is not None]

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def model(self, name: str) -> OipModel:
        """The same object until it changes. Raises UnknownModel or ModelNotReady."""
        if name not in self._models:
            raise UnknownModel.named(name)
        known = self._models[name]
        if known is None:
            raise ModelNotReady("The model, or a model that it runs, is not loaded.")
        return known

    def expose(self, names: Iterable[str], specs: Sequence[PipelineSpec] = ()) -> None:
        """Replaces the exposed models, and forgets all others. ``specs``: of the pipelines."""
        self._models = {name: self._models.get(name) for name in names}
        self._specs = specs
        in_flight = [(spec.model, spec.limits.in_flight) for spec in specs if spec.limits and spec.limits.in_flight]
        self.in_flight = dict(sorted(in_flight, key=lambda each: each[1]))

    def follow(self, lookup: Lookup, made: Mapping[str, dict[str, ModelConfig]]) -> None:
        """Updates the models. One that is not ready stays as it was; Triton reports its state.

        ``made``: those that are not Triton's, each with the models that it runs.
        """
        sequenced = {(spec.model, spec.version): spec for spec in self._specs if not spec.takes_requests}
        for key, spec in sequenced.items():
            models = lookup.models_of(key)
            if not isinstance(models, Missing):
                self._own_ids[key] = spec.own_ids_of(models[key[0]], models)
        sequences = [self._own_ids[key] for key in sequenced if key in self._own_ids]
        for name, known in self._models.items():
            models = made.get(name) or lookup.models_of((name, ""))
            if isinstance(models, Missing):
                if known is not None and known.layers:  # nothing makes it any more
                    self._models[name] = None
                continue
            config, specs = models[name], [spec for spec in self._specs if spec.model == name]
            below = {each.name for each in reached(config, models)}
            reserved = frozenset(own for own, stateful in sequences if stateful & below)
            first_s = [each.stream.first_output_s for each in specs if each.stream and each.stream.first_output_s]
            spec = PipelineSpec(
                model=name,
                stream=STREAM_OF_MODEL.model_copy(update={"first_output_s": max(first_s, default=None)}),
                idempotent=bool(specs) and all(each.idempotent for each in specs),
                cancel=next((each.cancel for each in specs if each.cancel), None),
            )
            model = OipModel(config, models, spec, reserved)
            self._models[name] = known if known == model else model


_Sources = list[tuple["EdgeEnd", str]]

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
    part_of: str = ""
    """The step of the pipeline whose model is the ensemble, or the step itself; empty for a pipeline without steps."""

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
    written: Mapping[str, Sequence[EdgeEnd]] = field(default_factory=dict)
    """Tensor of the pipeline's model -> what writes it: several of them if a step reads the first that is written."""

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
        config: ModelConfig, given: Mapping[str, _Sources], ensemble: str, version: str, own_name: str = ""
    ) -> dict[str, list[EdgeEnd]]:
        """Returns the ends that write the model's outputs. ``given``: input -> its sources, with the edges' names."""
        nonlocal left
        if not config.is_ensemble:
            places = sum(step.model == config.name for step in steps) + 1
            name = config.name if places == 1 else f"{config.name}#{places}"
            name = name if ensemble else own_name or name
            calls = tuple(models[model] for model in config.names_in("bls_calls") if model in models)
            steps.append(step := GraphStep(name, config, ensemble, version, calls, own_name))
            for spec in config.inputs:
                edges.extend(Edge(end, EdgeEnd(step, spec), name) for end, name in given.get(spec.name, ()))
            return {spec.name: [EdgeEnd(step, spec)] for spec in config.outputs}
        ends = {tensor: [end for end, _ in sources] for tensor, sources in given.items()}
        for index in config.runnable_steps(ends):
            if not left:
                break
            left -= 1
            each = config.steps[index]
            child = models.get(each.model)
            inputs: dict[str, _Sources] = {}
            for name, tensor in each.input_map:
                inputs.setdefault(name, []).extend((end, tensor) for end in ends.get(tensor, ()))
            inner = "" if each.name else config.name
            outputs = run(child, inputs, inner, each.version, each.name or own_name) if child is not None else {}
            for name, tensor in each.output_map:
                ends.setdefault(tensor, []).extend(outputs.get(name, ()))
        return ends

    written = run(config, {spec.name: [(EdgeEnd(None, spec), spec.name)] for spec in config.inputs}, "", version)
    answered = [
        Edge(end, EdgeEnd(None, spec), spec.name) for spec in config.outputs for end in written.get(spec.name, ())
    ]
    return Graph(
        steps=tuple(steps),
        edges=(*edges, *answered),
        models=frozenset(models),
        tensors=frozenset(spec.name for each in models.values() for spec in (*each.inputs, *each.outputs)),
        ensembles=frozenset(name for name, each in models.items() if each.is_ensemble),
        written=written,
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
