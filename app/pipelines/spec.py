"""The keys of ``gateway.yaml`` as types, with all documented defaults."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from app.coalescing.rows import Coalescing, refusals_of
from app.config.document import JsonValue, Location, Name, Seconds, Section
from app.config.mismatch import PipelineMismatch
from app.core.engine import PipelineLayer
from app.core.errors import FailureCode, InvalidRequest
from app.core.inference import BYTES
from app.core.model import Finding, ModelConfig, ModelKey, OwnIds, TensorSpec, reached, sequence_ids_of
from app.core.text import nearest
from app.pipelines.llm_spec import ChatSpec, OpenAISpec, PresetName, with_preset
from app.sessions.session import SessionSpec, missing_fault, own_ids_of, stateful_models
from app.steps.plan import SKIPPED, Plan, Source, Values, tensor_of
from app.steps.planner import Planner
from app.steps.steps_spec import Reason, Several, StepSpecs

Kind = Literal["number", "text", "json", "image", "binary"]
Join = Literal["concatenate", "list", "last", "sum"]


Enum = Annotated[list[JsonValue], Field(min_length=1)]
Bound = Annotated[int, Field(ge=-(2**63), lt=2**64)] | Annotated[float, Field(allow_inf_nan=False)]
Names = Annotated[list[str], Field(min_length=1)]
GrpcCode = Literal[FailureCode, "any"]
Member = Annotated[str, Field(pattern=r"^[^.\[\]]+(\.[^.\[\]]+)?(\[\])?$")]
ExampleName = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")]
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Examples = Annotated[dict[ExampleName, dict[str, JsonValue]], Field(max_length=16)]

SAMPLE = "sample"
"""The name of the pipeline's ``sample`` among its examples."""

ADAPTER = "adapter"
"""The field that names one of the pipeline's adapters."""

INDEX = "index"
"""In each output of a stream with ``batch``, the number of its item."""

RESERVED_NAMES = frozenset({"early_exit"})

RESERVED_PARAMETERS = re.compile(
    r"(triton_|sequence_|shared_memory_).*|priority|timeout|headers|binary_data|binary_data_output|classification"
)
"""Request parameters with a meaning in Triton. Triton also rejects all that begin with ``triton_``."""


def _expression(pattern: str) -> str:
    """Raises ValueError if it is not a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"is not a regular expression: {exc}") from exc
    return pattern


Expression = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_expression)]
"""A regular expression that is searched anywhere in a model's message."""


def _faults_of_bounds(spec: "InputSpec | ParameterSpec", ordered: bool, *types: type) -> Iterator[str]:
    """``ordered``: may have bounds. ``types``: those of the values of an enum; none if it may have no enum."""
    if not ordered and (spec.minimum is not None or spec.maximum is not None):
        yield "has a minimum or maximum, which only numbers can have"
    if spec.minimum is not None and spec.maximum is not None and spec.minimum > spec.maximum:
        yield "has a minimum above its maximum"
    if any(not isinstance(value, types) or isinstance(value, bool) for value in spec.enum or ()):
        yield "has an enum that its type does not allow"


class InputSpec(Section):
    tensor: str
    kind: Kind = "number"
    single: bool = False
    """The tensor has one free dimension, but always one element: a single value, as for the dims [1]."""
    base64: bool = False
    """The tensor has the file as base64 text instead of its bytes."""
    data_url: bool = False
    """The tensor has the image as a ``data:`` URL instead of its bytes."""
    optional: bool = False
    default: JsonValue = None
    missing: Literal["nan"] | None = None
    """The value that replaces ``null`` as a number. If it is not set, ``null`` is refused."""
    minimum: Bound | None = None
    maximum: Bound | None = None
    enum: Enum | None = None
    description: str = ""

    @property
    def is_required(self) -> bool:
        return not self.optional and self.default is None

    def faults(self) -> Iterator[str]:
        is_number, is_text = self.kind == "number", self.kind == "text"
        if self.missing is not None and not is_number:
            yield "has missing: nan, which only kind: number can have"
        yield from _faults_of_bounds(self, is_number, *((int, float) if is_number else (str,) if is_text else ()))
        if self.base64 and self.kind not in ("image", "binary"):
            yield "has base64: true, which only the kinds image and binary can have"
        if self.data_url and (self.kind != "image" or self.base64):
            yield "has data_url: true, which only kind: image without base64 can have"


class OutputSpec(Section):
    tensor: str = ""
    first: Several | None = None
    """With ``steps``: the tensors of which the first that was written is the output, in this order."""
    race: Several | None = None
    """With ``steps``: the tensors of which the first in time is the output."""
    kind: Kind = "number"
    single: bool = False
    """The tensor has one free dimension, but always one element: a single value."""
    join: Join | None = None
    accumulates: bool = False
    """Each response repeats the text so far. Callers get the differences."""
    none: str | None = None
    """A text that means no value."""
    reaches: Name | None = None
    """The output is ``length`` if the numbers of all responses reach the value of this parameter, else ``stop``."""
    description: str = ""

    @property
    def source(self) -> Source:
        """With ``steps``: what the output is."""
        return Source(tuple(self.first or self.race or (self.tensor,)), self.race is not None)

    def faults(self) -> Iterator[str]:
        if sum(map(bool, (self.tensor, self.first, self.race))) != 1:
            yield "needs exactly one of tensor, first and race; the last two only with `steps`"
        if self.join == "concatenate" and self.kind not in ("text", "json"):
            yield "has join: concatenate, which only the kinds text and json can have"
        if self.join == "sum" and self.kind != "number":
            yield "has join: sum, which only kind: number can have"
        if self.none is not None and self.kind != "text":
            yield "has none, which only kind: text can have"
        if self.accumulates and (self.kind != "text" or self.join not in (None, "concatenate")):
            yield "has accumulates: true, which only kind: text with join: concatenate can have"
        if self.reaches is not None and (self.kind != "number" or self.join is not None):
            yield "has reaches, which only kind: number without join can have"


ParameterType = Literal["integer", "number", "string", "boolean", "strings", "integers", "object", "text_or_tokens"]
_SEVERAL = frozenset({"strings", "integers", "object"})
_DATATYPES = {"integer": "INT64", "number": "FP64", "string": BYTES, "boolean": "BOOL"}
"""By type of a parameter of the request."""


class ParameterSpec(Section):
    """Sent as a parameter of Triton's request; with ``tensor`` as a tensor; with ``member_of`` in a JSON object."""

    type: ParameterType
    minimum: Bound | None = None
    maximum: Bound | None = None
    enum: Enum | None = None
    default: JsonValue = None
    optional: bool = False
    tensor: str | None = None
    member_of: str | None = None
    """The text tensor whose JSON object has this parameter as a member."""
    member: Member | None = None
    """The member's name; in a nested object ``outer.inner``. ``[]`` after the name: the value is sent as a list of one.

    Left out: the name of the parameter.
    """
    as_text: bool = False
    """The member is the value's JSON as a text."""
    send: JsonValue = None
    """The value of every request. Callers cannot set the parameter."""
    hidden: bool = False
    """Callers cannot set the parameter; an adapter can."""
    description: str = ""

    def faults(self) -> Iterator[str]:
        is_number, is_text = self.type in ("integer", "number", "integers"), self.type == "string"
        is_listed = is_number and self.type != "integers"
        yield from _faults_of_bounds(self, is_number, *((int, float) if is_listed else (str,) if is_text else ()))
        if self.tensor is not None and self.member_of is not None:
            yield "has both tensor and member_of"
        if self.member_of is None and (self.member is not None or self.as_text):
            yield "has member or as_text, which need member_of"
        if self.type == "text_or_tokens" and self.member_of is None:
            yield "is of type text_or_tokens, which needs member_of"
        if self.type in _SEVERAL and self.tensor is None and self.member_of is None:
            yield f"is of type {self.type}, which needs tensor or member_of"
        if self.send is not None and (self.default is not None or self.hidden or self.optional):
            yield "has send, which excludes default, optional and hidden"

    @property
    def is_settable(self) -> bool:
        """Whether a caller may set it."""
        return self.send is None and not self.hidden

    @property
    def is_required(self) -> bool:
        return self.is_settable and not self.optional and self.default is None


class StreamSpec(Section):
    progress_s: Seconds = 30.0
    """The longest silence of the model after its first response, and before it too without ``first_output_s``."""
    first_output_s: Seconds | None = None
    """The longest time until the model's first response."""
    timeout_s: Seconds = 600.0
    lag_s: Seconds = 30.0
    """The longest time that Triton keeps responses for a slow client."""
    resume_s: Seconds = 60.0
    """How long a resumable stream continues, and is kept, without a reader."""
    commit_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long a failure before the first output is still an ordinary HTTP error."""

    @property
    def longest_first_s(self) -> float:
        """The longest time until the model's first response, also if it is not declared."""
        return self.progress_s if self.first_output_s is None else self.first_output_s


STREAM_DEFAULTS = StreamSpec()


class ErrorMatch(Section):
    """Exactly one of ``message`` (the whole text), ``message_pattern`` (an anchored expression) and ``signed``."""

    code: GrpcCode
    message: str | None = None
    message_pattern: Annotated[str, AfterValidator(_expression)] | None = None
    signed: bool = False

    def faults(self) -> Iterator[str]:
        if sum((self.message is not None, self.message_pattern is not None, self.signed)) != 1:
            yield "needs exactly one of message, message_pattern and signed"


class EarlyExitRule(Section):
    reason: Reason
    error: ErrorMatch | None = None
    missing: Names | None = None
    empty: Names | None = None

    def faults(self) -> Iterator[str]:
        if sum(rule is not None for rule in (self.error, self.missing, self.empty)) != 1:
            yield "needs exactly one of error, missing and empty"


class RefusalRule(Section):
    """A message of the model that means that the caller can correct the request."""

    message_pattern: Expression
    code: Literal["context_length_exceeded", "invalid_input"]
    field: Name | None = None
    """The pipeline's field that is at fault."""
    detail: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The text for callers, in place of the model's message."""


class ContractSpec(Section):
    max_items: Annotated[int, Field(ge=0)] | str | None = None
    """A number, or the name of a parameter whose value in the request is the number."""
    shape: list[int] | None = None
    not_growing: bool = False


class CancelSpec(Section):
    model: str
    input: str


class LimitsSpec(Section):
    """How many requests and streams at a time, and how large. A missing ``in_flight`` is measured."""

    in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    queue: Annotated[int, Field(ge=0, le=100_000)] | None = None
    per_key: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Limit on the requests of one key in flight."""
    body_bytes: Annotated[int, Field(ge=1, le=64 * 1024 * 1024)] | None = None
    """The largest body. Left out: ``GATEWAY_MAX_BODY_BYTES``."""


class BatchSpec(Section):
    """A request has several items. More than the model takes at a time become several calls."""

    max_items: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """The most items of a request."""
    parts: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """The most items of a call. Left out: as many as the model takes."""


class CoalesceSpec(Section):
    """Small requests that wait for the model at the same time share one call."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How much the trial lets floating-point outputs differ between a request alone and one in a batch."""
    max_items: Annotated[int, Field(ge=2, le=100_000)] | None = None
    """The most items of one call. Left out: the smallest ``max_batch_size`` of the models that a request runs."""
    max_bytes: Annotated[int, Field(ge=1, le=64 * 1024 * 1024)] = 1024 * 1024
    """The most bytes of tensors in one call. A request above half of it has a call of its own."""


class PipelineSpec(Section):
    model: str
    """With ``steps``: the pipeline's own name."""
    steps: StepSpecs | None = None
    """The gateway runs several models itself."""
    preset: PresetName | None = None
    """The LLM backend that the model is: its keys are added to those of the file."""
    version: str = ""
    description: str = ""
    inputs: dict[Name, InputSpec] | None = None
    outputs: dict[Name, OutputSpec] | None = None
    parameters: dict[Name, ParameterSpec] = {}
    adapters: dict[AdapterName, dict[Name, JsonValue]] = {}
    """Adapter (LoRA) -> the values of the hidden parameters that select it."""
    early_exit: list[EarlyExitRule] = []
    stream: StreamSpec | None = None
    contract: dict[str, ContractSpec] = {}
    cancel: CancelSpec | None = None
    timeout_s: Seconds | None = None
    """Left out: ``GATEWAY_TIMEOUT_S``."""
    deadline_parameter: Name | None = None
    """The request parameter that tells the model its deadline, in milliseconds since 1970."""
    idempotent: bool = False
    readiness: Literal["required", "optional"] = "required"
    rejects_input: list[str] = []
    refusals: list[RefusalRule] = []
    engine_errors: list[Expression] = []
    """The model's messages that mean that its engine is dead although Triton says that the model is ready."""
    warmup: bool = True
    batch: BatchSpec | None = None
    coalesce: CoalesceSpec | None = None
    session: SessionSpec | None = None
    sample: dict[str, JsonValue] | None = None
    examples: Examples = {}
    """Further valid requests by name, in the form of ``sample``. The gateway never runs them on its own."""
    limits: LimitsSpec | None = None
    openai: OpenAISpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and "steps" in given and "model" not in given:
            return {"model": "", **given}
        return with_preset(given) if isinstance(given, dict) else given

    @field_validator("stream", "batch", "coalesce", "session", mode="before")
    @classmethod
    def _with_defaults(cls, value: Any, info: ValidationInfo) -> Any:
        """``true`` means the defaults, ``false`` none. ``stream:`` and ``batch:`` without a value mean the defaults."""
        if isinstance(value, str):
            raise ValueError("must be true, false or a mapping of keys to values")
        is_on = value is True or (value is None and info.field_name in ("stream", "batch"))
        return {} if is_on else None if value is False else value

    @field_validator("examples")
    @classmethod
    def _none_is_the_sample(cls, examples: dict[str, Any]) -> dict[str, Any]:
        if SAMPLE in examples:
            raise ValueError(f"the name '{SAMPLE}' is reserved for the pipeline's sample")
        return examples

    @property
    def called(self) -> dict[ModelKey, Location]:
        """The models that its requests call, and the key that names each."""
        steps = [(each, ("steps", name, "model")) for name, each in (self.steps or {}).items()]
        called: dict[ModelKey, Location] = {
            (each.model, each.version): key for each, key in steps if each.model is not None
        }
        return called or {(self.model, self.version): ("model",)}

    @property
    def reasons(self) -> list[str]:
        """Those of its early exits, each once."""
        exits = [each.exit for each in (self.steps or {}).values() if each.exit is not None]
        return list(dict.fromkeys([*(rule.reason for rule in self.early_exit), *exits]))

    def config_of(self, name: str, models: Mapping[str, ModelConfig]) -> ModelConfig:
        """The model that its requests run: of ``models``, or its steps as one. Raises PipelineMismatch."""
        if self.steps is None:
            return models[self.model]
        usage = None if self.openai is None else self.openai.usage
        counted = () if usage is None else (usage.prompt_tokens, usage.completion_tokens or "")
        further = [each for rule in self.early_exit for each in (*(rule.missing or ()), *(rule.empty or ()))]
        further += [*counted, *self.contract]
        outputs = {each.source: ("outputs", key) for key, each in (self.outputs or {}).items()}
        sent = {name: each for name, each in self.parameters.items() if each.tensor is None and each.member_of is None}
        fields = {
            name: TensorSpec(name, _DATATYPES[each.type], (1,), (each.optional or each.hidden) and each.default is None)
            for name, each in sent.items()
        }
        values = {name: each.default if each.send is None else each.send for name, each in sent.items()}
        defaults: Values = {name: tensor_of(name, value) for name, value in values.items() if value is not None}
        planner = Planner(self.steps, models, fields, constants=defaults)
        return planner.planned(name, None if self.outputs is None else outputs, further)

    def with_chat(self, chat: ChatSpec) -> Self:
        """The declaration with what was read for its chat. Needs ``openai``."""
        assert self.openai is not None
        return self.model_copy(update={"openai": self.openai.model_copy(update={"chat": chat})})

    @property
    def runs_sample(self) -> bool:
        """Whether the gateway itself runs the sample. With sessions, it would wait for, and take, a caller's place."""
        return self.sample is not None and self.warmup and self.takes_requests

    @property
    def takes_requests(self) -> bool:
        """Whether each request of a caller stands alone. Otherwise it is a step of a session."""
        return self.session is None

    def needs_sequence(self, name: str, model: str) -> InvalidRequest:
        """The error of a request that stands alone, for a model that runs only requests of a sequence."""
        if self.session is not None:
            text = f"Pipeline '{name}' has sessions: each request is a step of a session."
            return InvalidRequest(text, hint=f"Open one with POST /v1/pipelines/{name}/sessions.")
        hint = (
            "An operator can declare `session: true` for the pipeline in gateway.yaml. Or call POST "
            f"/v2/models/{self.model}/infer with the parameters `sequence_id`, `sequence_start` and `sequence_end`."
        )
        return InvalidRequest(f"Model '{model}' needs a session.", hint=hint)

    def own_ids_of(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> tuple[OwnIds, frozenset[str]]:
        """The ids of the sequences that the gateway makes, and the stateful models that have these sequences."""
        stateful = frozenset(each.name for each in stateful_models(config, models))
        return own_ids_of(sequence_ids_of(config, models)), stateful

    def findings(self, name: str | None, config: ModelConfig, models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
        """The linter's findings about the layers. ``name``: None without gateway.yaml."""
        if self.session is None:
            return missing_fault(config, models)
        limits = {"timeout_s": self.timeout_s or 0.0}
        if self.stream is not None and "timeout_s" in self.stream.model_fields_set:
            limits["stream.timeout_s"] = self.stream.timeout_s
        return self.session.findings(name, config, models, limits=limits, may_exit=bool(self.early_exit))

    def missing_keys(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> dict[str, bool]:
        """The keys that the model needs beside those that are declared."""
        return {"session": True} if self.session is None and any(missing_fault(config, models)) else {}

    @property
    def joins_requests(self) -> bool:
        """Whether the gateway joins small requests to one call."""
        return self.coalesce is not None

    def layers_of(self, name: str, config: ModelConfig, models: Mapping[str, ModelConfig]) -> tuple[PipelineLayer, ...]:
        """The layers around the engine that the pipeline uses.

        ``models``: those that a request runs through, as far as they are known. Raises PipelineMismatch with the reason
        if the models do not fit.
        """
        if isinstance(config, Plan):
            return (config,)
        if self.session is not None:
            terms = self.session.terms_of(config, models)
            if isinstance(terms, str):
                raise PipelineMismatch(("session",), f"is on, but {terms}")
            return () if terms is None else (terms,)
        if self.coalesce is None:
            return ()
        steps = reached(config, models, by_steps=True)
        for refusal in chain(self._reasons_not_to_coalesce(), refusals_of(steps)):
            raise PipelineMismatch(("coalesce",), f"is on, but {refusal}")
        smallest = min(each.max_batch_size for each in steps)
        coalescing = Coalescing(
            name,
            max_items=min(smallest, self.coalesce.max_items or smallest),
            max_bytes=self.coalesce.max_bytes,
            outputs={each.name: each.dims for each in config.outputs},
            steps=sum(not each.is_ensemble for each in steps) or 1,
            tolerance=self.coalesce.tolerance,
        )
        return (coalescing,)

    def _reasons_not_to_coalesce(self) -> Iterator[str]:
        if not self.idempotent:
            yield "the pipeline is not `idempotent: true`: a request of a call that failed is sent again"
        if not self.runs_sample:
            yield "the pipeline has no `sample` that runs at start, with which the gateway tries the model"
        if self.early_exit:
            yield "the pipeline has `early_exit` rules: they are for one request, and would end all requests of a call"
        if self.cancel is not None:
            yield "the pipeline has `cancel`, which would stop the other requests of a call"
        if self.deadline_parameter is not None:
            yield "the pipeline has `deadline_parameter`, and the requests of a call have different deadlines"
        for tensor, contract in self.contract.items():
            if contract.max_items is not None:
                yield f"the contract of '{tensor}' counts items, which a model would count over all requests of a call"

    def faults(self) -> Iterator[str]:
        yield from self._faults_of_steps()
        for name in () if self.openai is None else self.openai.exits.keys() - {*self.reasons}:
            yield f"openai.exits names '{name}', which is not a reason of an early exit{nearest(name, self.reasons)}"
        outputs, parameters, inputs = (set(names or ()) for names in (self.outputs, self.parameters, self.inputs))
        if reserved := (outputs | parameters | inputs) & RESERVED_NAMES:
            yield f"the name '{reserved.pop()}' is reserved"
        if twice := inputs & parameters:
            yield f"the name '{twice.pop()}' is used for an input and a parameter"
        if self.batch is not None and self.stream is not None and INDEX in outputs:
            yield f"the output name '{INDEX}' is reserved: in streams with batch it is the number of the item"
        if self.adapters and ADAPTER in parameters | inputs:
            yield f"the field name '{ADAPTER}' is reserved in a pipeline with adapters"
        for name, parameter in self.parameters.items():
            if parameter.tensor is None and parameter.member_of is None and RESERVED_PARAMETERS.fullmatch(name):
                yield f"the parameter '{name}' is reserved by Triton"
        deadline = self.deadline_parameter
        if deadline is not None and (deadline in parameters or RESERVED_PARAMETERS.fullmatch(deadline)):
            yield f"the deadline_parameter '{deadline}' is the name of another parameter"
        # A step of a session is one request of a sequence: the model must see it exactly once, and to its end.
        excluded = ("batch", "coalesce", "idempotent", "cancel", "openai") if self.session is not None else ()
        if wrong := next((key for key in excluded if getattr(self, key)), None):
            yield f"has session, which excludes {wrong}"
        for adapter, values in self.adapters.items():
            for name in values:
                if name not in self.parameters or not self.parameters[name].hidden:
                    yield f"the adapter '{adapter}' sets '{name}', which is not a parameter with hidden: true"

    def _faults_of_steps(self) -> Iterator[str]:
        if self.steps is None:
            if wrong := next((name for name, each in (self.outputs or {}).items() if not each.tensor), None):
                yield f"the output '{wrong}' has first or race, which only a pipeline with steps can have"
            return
        excluded = ("model", "preset", "version", "batch", "coalesce", "session", "cancel")
        if wrong := next((key for key in excluded if getattr(self, key)), None):
            yield f"has steps, which exclude {wrong}"
        if SKIPPED in (self.outputs or {}):
            yield f"the output name '{SKIPPED}' is reserved in a pipeline with steps"
        versions = dict(self.called.keys())
        if twice := next((model for model, version in self.called if versions[model] != version), None):
            yield f"has steps with several versions of model '{twice}'"


class OipSpec(Section):
    models: Literal["all"] | list[str] = []
    """Served under ``/v2`` in addition to the models of the pipelines."""
    coalesce: list[str] = []
    """Models of pipelines with ``coalesce`` whose requests under ``/v2`` share calls too."""

    @property
    def models_with_layers(self) -> list[str]:
        """The models whose requests under ``/v2`` use the layers of their pipelines."""
        return self.coalesce


class GatewaySpec(Section):
    pipelines: Annotated[dict[Name, PipelineSpec], Field(min_length=1)]
    oip: OipSpec | None = None
    accept: list[str] = []

    @field_validator("pipelines")
    @classmethod
    def _named_after_steps(cls, pipelines: dict[str, PipelineSpec]) -> dict[str, PipelineSpec]:
        """Steps are one model, with the pipeline's name."""
        steps = {name: each for name, each in pipelines.items() if each.steps is not None}
        return pipelines | {name: each.model_copy(update={"model": name}) for name, each in steps.items()}

    @property
    def of_steps(self) -> set[str]:
        """The pipelines that are models of their own."""
        return {name for name, each in self.pipelines.items() if each.steps is not None}

    def faults(self) -> Iterator[str]:
        called = {model for each in self.pipelines.values() for model, _ in each.called}
        for name in self.pipelines:
            if name in self.of_steps & called:
                yield f"the pipeline '{name}' has steps and the name of a model that a pipeline calls: rename it"
        tried = {each.model for each in self.pipelines.values() if each.coalesce is not None}
        for model in self.oip.coalesce if self.oip is not None else ():
            if model not in tried:
                yield f"oip.coalesce names '{model}', which is not the model of a pipeline with coalesce"
