"""The answers of ``GET /v1/pipelines``: fields, types, limits, the model, and samples that work as pasted.

The graph of a pipeline in ``GET /v1/pipelines/{pipeline}``: steps, tensors between them, and early exits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from app.core.json import TEXT
from app.core.model import ModelConfig, TensorSpec
from app.lint.findings import Severity, checks
from app.pipelines.catalog import Catalog
from app.pipelines.examples import Filled, declared_requests, example_of, paths_in
from app.pipelines.graph import EdgeEnd, GraphStep
from app.pipelines.inputs import InputField
from app.pipelines.openai_mapping import OpenAIMapping
from app.pipelines.outputs import OutputField
from app.pipelines.parameters import ParameterField
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import event_schema, request_schema, result_schema
from app.pipelines.spec import EarlyExitRule
from app.pipelines.version import VersionState


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
                "datatype": edge.source.tensor.datatype,
                "shape": edge.source.tensor.dims,
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


def _end(end: EdgeEnd) -> dict[str, Any]:
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


class _Named(Struct, kw_only=True):
    name: str
    description: str
    model: str
    state: VersionState
    state_detail: Annotated[str | None, Meta(description="Why the pipeline is not ready")]
    decoupled: Annotated[bool | UnsetType, Meta(description="Of a pipeline whose model is known")] = UNSET
    streams: bool
    url: str


_Absences = Annotated[
    Mapping[str, Literal["not_ready", "other_signature"]] | UnsetType,
    Meta(description="Of several Tritons, the addresses that are not called for the pipeline"),
]


class PipelineSummary(_Named, kw_only=True):
    missing_at: _Absences = UNSET


class PipelineList(Struct):
    pipelines: list[PipelineSummary]


class PipelineField(Struct, kw_only=True):
    name: str
    description: str
    kind: str
    tensor: str
    datatype: str
    shape: Annotated[Sequence[int], Meta(description="-1: any size")]


class PipelineInput(PipelineField, kw_only=True):
    required: bool
    default: Any


class PipelineOutput(PipelineField, kw_only=True):
    join: str | None


class PipelineExample(Struct):
    name: Annotated[str, Meta(description="`sample` is the pipeline's sample")]
    files: Annotated[dict[str, str], Meta(description="The paths of its files by field")]


class OpenAIForm(Struct):
    """A pipeline at one of OpenAI's addresses."""

    input: Annotated[str, Meta(description="The pipeline's input that has the text")]
    parameters: Annotated[Mapping[str, str], Meta(description="OpenAI's name of a parameter -> the pipeline's field")]
    counts_tokens: Annotated[bool, Meta(description="Whether answers have `usage`")]


_Object = Annotated[dict[str, Any], Meta(extra_json_schema={"additionalProperties": True})]
_Parameter = Annotated[
    _Object,
    Meta(
        description="With the keys of gateway.yaml, such as `minimum` and `default`",
        extra_json_schema={
            "required": ["name", "required", "type"],
            "properties": {"name": TEXT, "required": {"type": "boolean"}, "type": TEXT, "description": TEXT},
        },
    ),
]


class PipelineDescription(_Named, kw_only=True):
    """Until the pipeline's model is known, only the required properties are present."""

    version: Annotated[str | UnsetType | None, Meta(description="null: Triton chooses the version")] = UNSET
    inputs: list[PipelineInput] | UnsetType = UNSET
    parameters: list[_Parameter] | UnsetType = UNSET
    outputs: list[PipelineOutput] | UnsetType = UNSET
    graph: _Object | UnsetType = UNSET
    early_exit: Annotated[list[str] | UnsetType, Meta(description="The possible reasons")] = UNSET
    openai: Annotated[
        dict[Literal["chat", "completions", "embeddings"], OpenAIForm] | UnsetType,
        Meta(description="What the pipeline offers under `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`"),
    ] = UNSET
    limits: _Object | UnsetType = UNSET
    schemas: Annotated[_Object | UnsetType, Meta(description="JSON Schemas: `request`, `result`, `output_event`")] = (
        UNSET
    )
    sample: Annotated[_Object | UnsetType, Meta(description="The values of a valid request, without its files")] = UNSET
    examples: list[PipelineExample] | UnsetType = UNSET
    samples: Annotated[dict[str, str] | UnsetType, Meta(description="Calls that work as pasted")] = UNSET
    missing_at: _Absences = UNSET


def summarize(catalog: Catalog, name: str) -> PipelineSummary:
    return PipelineSummary(**_named(catalog, name))


def _named(catalog: Catalog, name: str) -> dict[str, Any]:
    entry = catalog.entry(name)
    return {
        "name": name,
        "description": entry.spec.description,
        "model": entry.spec.model,
        "state": entry.state,
        "state_detail": entry.state_detail,
        "decoupled": entry.pipeline.config.decoupled if entry.pipeline else UNSET,
        "streams": entry.spec.stream is not None and entry.spec.takes_requests,
        "url": f"/v1/pipelines/{name}",
        "missing_at": catalog.engine.absences(entry.spec.model, entry.spec.version) or UNSET,
    }


def describe(
    catalog: Catalog,
    name: str,
    load_limits: Callable[[Pipeline], dict[str, Any]],
    samples_of: Callable[[Pipeline], dict[str, str]],
) -> PipelineDescription:
    """For a pipeline that is not compiled yet, returns only the file's content and the reason why it is not ready."""
    described, pipeline = PipelineDescription(**_named(catalog, name)), catalog.entry(name).pipeline
    if pipeline is None:
        return described
    return replace(described, **_compiled(pipeline, load_limits(pipeline)), samples=samples_of(pipeline))


def _compiled(pipeline: Pipeline, load_limits: dict[str, Any]) -> dict[str, Any]:
    spec, files = pipeline.spec, {field.name for field in pipeline.inputs if field.is_file}
    values = example_of(pipeline).items()  # of a form, without files and long lists
    sample = {name: value for name, value in values if name not in files and not isinstance(value, Filled)}
    return {
        "version": spec.version or None,
        "inputs": [_input(field) for field in pipeline.inputs],
        "parameters": [_parameter(field) for field in pipeline.parameters],
        "outputs": [_output(field, pipeline) for field in pipeline.outputs],
        "graph": graph_described(pipeline),
        "early_exit": list(dict.fromkeys(rule.reason for rule in spec.early_exit)),
        "openai": _openai(pipeline.openai) or UNSET,
        "limits": {
            "timeout_s": pipeline.timeout_s,
            **load_limits,
            **(
                {"stream": spec.stream.model_dump() | {"first_output_s": spec.stream.longest_first_s}}
                if spec.stream is not None
                else {}
            ),
        },
        "schemas": {
            "request": request_schema(pipeline),
            "result": result_schema(pipeline),
            "output_event": event_schema(pipeline) if spec.stream is not None else None,
        },
        "sample": sample,
        "examples": [
            PipelineExample(name, paths_in(pipeline, values)) for name, values in declared_requests(spec).items()
        ],
    }


def _openai(mapping: OpenAIMapping | None) -> dict[str, OpenAIForm]:
    if mapping is None:
        return {}
    texts = {"chat": mapping.chat, "completions": mapping.completions}
    found = {
        kind: OpenAIForm(form.prompt, form.field_by_parameter, form.usage is not None)
        for kind, form in texts.items()
        if form
    }
    if (vectors := mapping.embeddings) is not None:
        found["embeddings"] = OpenAIForm(vectors.input, vectors.field_by_parameter, vectors.counts_tokens)
    return found


def _input(field: InputField) -> PipelineInput:
    return PipelineInput(**_field(field), required=field.is_required, default=field.spec.default)


def _output(field: OutputField, pipeline: Pipeline) -> PipelineOutput:
    return PipelineOutput(**_field(field), join=field.join if pipeline.config.decoupled else None)


_OF_THE_MODEL = {"member_of", "member", "as_text", "hidden"}
"""How the model gets a parameter, which is of no use for callers."""


def _parameter(field: ParameterField) -> dict[str, Any]:
    spec = field.spec.model_dump(exclude_none=True, exclude=_OF_THE_MODEL)
    return {"name": field.name, "required": field.is_required, **spec}


def _field(field: InputField | OutputField) -> dict[str, Any]:
    return {
        "name": field.name,
        "description": field.spec.description,
        "kind": field.spec.kind,
        "tensor": field.tensor.name,
        "datatype": field.tensor.datatype,
        "shape": field.tensor.dims,
    }


class FindingAnswer(Struct, kw_only=True):
    severity: Severity
    code: Annotated[str, Meta(extra_json_schema={"enum": [*checks()]})]
    pipeline: Annotated[str | None, Meta(description="The pipeline of gateway.yaml that the finding is about")]
    model: str | None
    step: Annotated[int | None, Meta(description="The step of the ensemble, from 1")]
    tensor: str | None
    text: str
    solution: Annotated[str, Meta(description="What to do about findings with this code; names between backticks")]


class FindingList(Struct):
    findings: list[FindingAnswer]


class StreamStarted(TypedDict):
    id: str
    url: str
    request_id: str
