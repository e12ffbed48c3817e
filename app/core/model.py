"""Describes a Triton model by its configuration: how many requests it can work on, and which sequence ids it takes.

Source: Triton's ``model_config.proto``. The gateway uses the configuration because the metadata lacks ``optional``,
``decoupled`` and the steps of an ensemble.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import Struct

from app.core.errors import InvalidInput
from app.core.inference import BYTES

Node = TypeVar("Node")

ModelKey = tuple[str, str]
"""A model's name and version; an empty version means the newest."""

_NO_DATATYPE = "INVALID"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared input or output. ``dims`` has no batch dimension; -1 is any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def is_typed(self) -> bool:
        """Whether the configuration declares its datatype and shape."""
        return self.datatype != _NO_DATATYPE and bool(self.dims)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an ensemble or pipeline. The maps have (its model's tensor, the tensor outside)."""

    model: str
    version: str
    input_map: tuple[tuple[str, str], ...]
    output_map: tuple[tuple[str, str], ...]
    name: str = ""
    """Only of a step that the gateway runs."""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """``id_datatype``: of the correlation-id control, or empty if the model has none."""

    id_datatype: str = ""
    is_iterative: bool = False
    """Whether Triton makes the id, because each request is a sequence of its own."""
    idle_s: float = 1.0
    """Triton forgets a sequence whose last request was queued this long ago. 1 s is Triton's default."""
    candidates: int = 0
    """Sequences of an instance at a time with the oldest scheduler; 0: the direct scheduler."""
    knows_starts: bool = True
    """Whether the model can tell the first request of a sequence."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False
    steps: tuple[Step, ...] = ()
    instance_count: int = 1
    parameters: tuple[tuple[str, str], ...] = field(default=())
    limits_queue: bool = False
    """Whether its queue policy refuses requests: a largest queue or a timeout."""
    joins_requests: bool = False
    """Whether Triton joins several requests to one batch."""
    sequence: SequenceBatching | None = None
    """Set for a model with ``sequence_batching``."""
    unjoinable_inputs: tuple[str, ...] = ()
    """Inputs whose first dimension is not the batch: ragged inputs and shape tensors."""
    caches_responses: bool = False
    """Whether Triton may answer from its response cache."""
    together: tuple[frozenset[str], ...] = ()
    """Outputs that belong to the same response: one that is missing there has a place in a list of all responses."""

    @property
    def is_ensemble(self) -> bool:
        return bool(self.steps)

    @property
    def sequence_slots(self) -> int:
        """The number of sequences that run at a time, over all instances. Triton lets further ones wait."""
        candidates = self.sequence.candidates if self.sequence is not None else 0
        return self.instance_count * (candidates or max(self.max_batch_size, 1))

    @property
    def calls(self) -> tuple[str, ...]:
        """The models that this model calls: an ensemble's steps, and the declared calls of a BLS model."""
        return (*(step.model for step in self.steps), *self.names_in("bls_calls"))

    @property
    def declares_tensors(self) -> bool:
        """Whether it declares inputs and outputs with datatype and shape; otherwise Triton may auto-complete them."""
        return bool(self.inputs and self.outputs) and all(spec.is_typed for spec in (*self.inputs, *self.outputs))

    def runnable_steps(self, given: Iterable[str]) -> list[int]:
        """The indexes of an ensemble's steps in an order in which they can run, without steps that can never run.

        ``given``: the ensemble's tensors that a request provides.
        """
        written, order = set(given), list[int]()
        waiting = dict(enumerate(self.steps))
        while ready := [i for i, step in waiting.items() if all(tensor in written for _, tensor in step.input_map)]:
            order += ready
            written |= {tensor for i in ready for _, tensor in waiting.pop(i).output_map}
        return order

    def parameter(self, name: str) -> str:
        """Returns an empty string if the configuration does not set the parameter."""
        return dict(self.parameters).get(name, "")

    def names_in(self, parameter: str) -> tuple[str, ...]:
        """The names that a parameter lists, separated by commas, as declared by the model's author.

        ``may_omit``: the outputs that may be missing in a response. ``bls_calls``: the models that its script calls.
        ``early_exits``: the reasons of early exits that it causes by an error.
        """
        return tuple(name for part in self.parameter(parameter).split(",") if (name := part.strip()))


def walk(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yields each node once, the first ones first, each before what follows it."""
    waiting, seen = [*starts][::-1], set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [*following(node)][::-1]


def reached(config: ModelConfig, models: Mapping[str, ModelConfig], *, by_steps: bool = False) -> list[ModelConfig]:
    """The model and the models below it that ``models`` has. ``by_steps``: without the calls of scripts."""
    known = {**models, config.name: config}

    def below(name: str) -> Iterator[str]:
        names = (step.model for step in known[name].steps) if by_steps else known[name].calls
        return (each for each in names if each in known)

    return [known[name] for name in walk([config.name], below)]


def takes_traceparent(config: ModelConfig, models: Mapping[str, ModelConfig]) -> bool:
    """Whether requests get the parameter ``traceparent``, which all steps of an ensemble then receive.

    A model must declare it. The vLLM backend fails on parameters that it does not know.
    """
    below = reached(config, models)
    is_read = any(each.parameter("reads_traceparent").lower() == "true" for each in below)
    return is_read and all(each.backend != "vllm" for each in below)


@dataclass(frozen=True, slots=True)
class ModelState:
    """One row of Triton's repository index."""

    name: str
    version: str
    ready: bool
    reason: str = ""
    """Triton's reason why the model is not ready; it may contain paths and tracebacks."""


class Finding(Struct, frozen=True):
    """What is wrong and what to do. The linter has the severity of each ``code``.

    ``step`` counts from 1 within ``model``, an ensemble; it and ``tensor`` are None where they say nothing.
    ``pipeline``: for a finding in gateway.yaml, the pipeline that it is about.
    """

    code: str
    text: str
    model: str | None = None
    step: int | None = None
    tensor: str | None = None
    pipeline: str | None = None


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """``config`` may be incomplete; it is empty for a model whose configuration cannot be read.

    The members behind ``complaint`` are empty for a model of a running server. Scripts are parsed and never executed.
    """

    folder: str
    config: ModelConfig
    versions: tuple[str, ...] = ()
    """Those that Triton loads."""
    calls: frozenset[str] = frozenset()
    """The models that its script calls (BLS), as far as they are declared or can be read."""
    complaint: str = ""
    """Why the configuration cannot be read, with its path; empty if it can."""
    backend: str = ""
    """The backend that Triton takes, by the configuration or the model file's name; empty if unknown."""
    findings: tuple[Finding, ...] = ()
    """Why Triton refuses to load it, and what is wrong with its scripts."""
    sends_errors: bool = False
    """Whether a script makes a ``TritonError``, or raises in ``execute``."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration, as the JSON of Triton's HTTP endpoint. Also of a model of a running server."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of the narrowest step on a request's path through its models."""

    instances: int = 1
    """Executions at a time."""
    requests: int = 1
    """Requests in these executions, if every batch is full."""
    is_decoupled: bool = False


def capacity_of(config: ModelConfig, models: Mapping[str, ModelConfig]) -> Capacity:
    """Returns how many requests a model can work on at a time, as far as its configuration tells.

    ``models``: those that a request to ``config`` runs through, by name. Ensembles themselves do not compute.
    """
    steps = [each for each in models.values() if not each.is_ensemble] or [config]
    return Capacity(
        instances=min(each.instance_count for each in steps),
        requests=min(each.instance_count * max(each.joins_requests * each.max_batch_size, 1) for each in steps),
        is_decoupled=config.decoupled,
    )


def largest_batch(config: ModelConfig, models: Mapping[str, ModelConfig]) -> int:
    """Returns the most items of a request: of an ensemble, those of its smallest step. 0 without batch dimension.

    ``models``: those below ``config``, by name. A step without batch dimension has no limit.
    """
    if not config.max_batch_size:
        return 0
    below = reached(config, models, by_steps=True)
    return min(each.max_batch_size for each in below if each.max_batch_size)


MAX_ID_BYTES = 128
"""Triton's limit for a text, which it counts in bytes."""
_LARGEST = {"UINT64": 2**64 - 1, "INT64": 2**63 - 1, "UINT32": 2**32 - 1, "INT32": 2**31 - 1}
_DANGEROUS_BYTES = range(125, 128)
"""Triton 2.51 sends a text control in 132 bytes. The Python backend ends if 1 to 3 bytes remain behind the text."""

OwnIds = range | str
"""Ids that the gateway makes itself: a range of numbers, or the start of texts."""


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """The sequence ids that the models of a request accept.

    Triton 2.51 does not compare an id with the model's correlation-id control. A text in a numeric control overwrites
    the memory of Triton, a number in a text control ends the model's process, and a control of 32 bits gets the low
    bits of a larger number, which may be the id of another sequence.

    ``needed_by``: a model that runs no request without an id, or empty.

    ``made_for``: a model with ``iterative_sequence``, or empty. Triton numbers its sequences from 1, so an id of a
    caller could be the id of another caller's request.
    """

    needed_by: str = ""
    made_for: str = ""
    max_number: int = _LARGEST["UINT64"]
    """0: numbers are not allowed."""
    takes_text: bool = True
    is_text_tensor: bool = False
    """Whether a model gets the text as a tensor."""
    reserved: frozenset[OwnIds] = frozenset()
    """Those that the gateway makes itself for the same models."""

    @property
    def form(self) -> str:
        """Describes the allowed ids."""
        text = f"a text of 1 to {MAX_ID_BYTES} bytes"
        text += f" that does not have {_DANGEROUS_BYTES[0]} to {_DANGEROUS_BYTES[-1]} bytes" * self.is_text_tensor
        number = f"an integer of 1 to {self.max_number}"
        forms = [number] * (self.max_number > 0) + [text] * self.takes_text
        return "no id fits all models that it runs" if self.made_for or not forms else " or ".join(forms)

    def check(self, sequence_id: object) -> None:
        """``sequence_id``: 0 or an empty text means no sequence, as in Triton. Raises InvalidInput."""
        if sequence_id in (0, ""):
            if self.needed_by:
                text = f"inference request to model '{self.needed_by}' must specify a non-zero or non-empty correlation"
                raise InvalidInput(
                    f"{text} ID.",
                    hint=f"Send the parameter `sequence_id`, {self.form}, with each request of a sequence, "
                    "`sequence_start: true` with the first and `sequence_end: true` with the last.",
                )
        elif self.made_for:
            text = f"parameter 'sequence_id' is not allowed: Triton makes the id for model '{self.made_for}'."
            raise InvalidInput(text, hint="The model has `iterative_sequence: true`.")
        elif not self._fits(sequence_id):
            raise InvalidInput(f"parameter 'sequence_id' has invalid type or value; expected {self.form}.")
        elif any(
            isinstance(sequence_id, str) and sequence_id.startswith(own)
            if isinstance(own, str)
            else isinstance(sequence_id, int) and sequence_id in own
            for own in self.reserved
        ):
            text = "parameter 'sequence_id' is one of those that the gateway makes itself for this model."
            own_ids = sorted(
                f"a text that begins with '{own}'" if isinstance(own, str) else f"from {own[0]} to {own[-1]}"
                for own in self.reserved
            )
            raise InvalidInput(text, hint=f"Use an id that is not {' or '.join(own_ids)}.")

    def _fits(self, sequence_id: object) -> bool:
        if isinstance(sequence_id, str):
            size = len(sequence_id.encode("utf-8", "surrogatepass"))
            is_dangerous = self.is_text_tensor and size in _DANGEROUS_BYTES
            return self.takes_text and size <= MAX_ID_BYTES and not is_dangerous
        return type(sequence_id) is int and 0 < sequence_id <= self.max_number


def sequence_ids_of(config: ModelConfig, models: Mapping[str, ModelConfig]) -> SequenceIds:
    """``models``: by name, at least those that a request to ``config`` runs through.

    A step of an ensemble gets the id of the request. A BLS script may pass the id on, or use its own.
    """
    below = reached(config, models)
    given_id = reached(config, models, by_steps=True)
    datatypes = {each.sequence.id_datatype for each in below if each.sequence and not each.sequence.is_iterative}
    largest = [_LARGEST[each] for each in datatypes if each in _LARGEST]
    return SequenceIds(
        needed_by=next((each.name for each in given_id if each.sequence and not each.sequence.is_iterative), ""),
        made_for=next((each.name for each in below if each.sequence and each.sequence.is_iterative), ""),
        max_number=0 if BYTES in datatypes else min(largest, default=_LARGEST["UINT64"]),
        takes_text=not largest,
        is_text_tensor=BYTES in datatypes,
    )
