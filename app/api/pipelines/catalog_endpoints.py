"""Serves what there is: the catalog of pipelines with their examples, statistics and findings.

``GET /v1/pipelines/{pipeline}`` has fields, types, limits, samples that work as pasted, and the graph: steps, tensors
between them, and early exits. The console draws it, ``/v1/statistics`` and ``/v1/findings``.

Samples are calls with curl, JavaScript and Python: `samples.jinja` has their texts. The address comes from the caller's
Host header and values come from gateway.yaml, so every text is quoted.
"""

import asyncio
import functools
import json
import logging
import re
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import Environment, PackageLoader
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict, replace
from starlette.responses import Response

from app.admission.keys import ANYONE
from app.api.bodies import Limits
from app.api.call import Inference
from app.api.endpoint import Found, Layer
from app.api.exchange import Exchange, JsonResponse, check_pipeline
from app.core.aio import Fresh
from app.core.errors import UnknownExample
from app.core.json import TEXT
from app.core.model import Finding, ModelConfig
from app.core.text import nearest, without_nearest
from app.lint.findings import Severity, check_of, checks
from app.observability.metrics import Statistics, no_requests
from app.pipelines import examples
from app.pipelines.catalog import VersionState
from app.pipelines.fields import InputField, OutputField
from app.pipelines.models import EdgeEnd
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import EarlyExitRule

STATISTICS_S = 0.5
"""How long statistics are sent again without reading the metrics, which takes 12 ms for 80 series of ten pipelines."""
FINDINGS_S = 5.0
"""How long findings are sent again without a new check, which asks Triton for every model."""
_OF_THE_MODEL = {"member_of", "member", "as_text", "hidden"}
"""How the model gets a parameter, which is of no use for callers."""
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PLAIN_PATH = re.compile(r"[\w./-]+")
SAMPLES = "pipelines/samples.jinja"
_TEMPLATES = Environment(loader=PackageLoader("app.api", ""), trim_blocks=True, lstrip_blocks=True)
_TEMPLATES.filters |= {"sh": shlex.quote, "json": json.dumps, "repr": repr}
_log = logging.getLogger(__name__)


class PipelineSummary(Struct, kw_only=True):
    name: str
    description: str
    model: str
    state: VersionState
    state_detail: Annotated[str | None, Meta(description="Why the pipeline is not ready")]
    decoupled: Annotated[bool | UnsetType, Meta(description="Of a pipeline whose model is known")] = UNSET
    streams: bool
    url: str
    missing_at: Annotated[
        Mapping[str, Literal["not_ready", "other_signature"]] | UnsetType,
        Meta(description="Of several Tritons, the addresses that are not called for the pipeline"),
    ] = UNSET


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
    files: Annotated[dict[str, str | Sequence[str]], Meta(description="The paths of its files by field")]


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


class PipelineDescription(PipelineSummary, kw_only=True):
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


@dataclass(eq=False)
class CatalogEndpoints:
    """``known_statistics``: of all processes. ``known_findings``: what the linter finds now; raises GatewayError."""

    inference: Inference
    limits: Limits
    layers: Sequence[Layer]
    known_statistics: Callable[[], Awaitable[Statistics]]
    known_findings: Callable[[], Awaitable[Sequence[Finding]]]

    def __post_init__(self) -> None:
        self._catalog = self.inference.catalog
        self._statistics = Fresh(self.known_statistics, STATISTICS_S)
        self._findings = Fresh(self.known_findings, FINDINGS_S)

    async def list_pipelines(self, exchange: Exchange, _found: Found) -> Response:
        """The pipelines.

        The pipelines that the caller may use, with their states, ready or not.
        """
        key, catalog = exchange.key, self._catalog
        catalog.check_known()
        allowed = [name for name in catalog.entries if key.allows(name)]
        listed = [self._summary(name) for name in allowed]
        flags = {name: value for layer in self.layers for name, value in layer.flags_for(key).items()}
        return JsonResponse({"pipelines": listed, **flags})

    async def get_pipeline(self, exchange: Exchange, found: Found) -> Response:
        """Fields, types, limits, graph and samples.

        What a form or a program needs to call the pipeline, with samples that work as pasted.
        """
        name, catalog = found["name"], self._catalog
        check_pipeline(exchange, catalog, name)
        described, pipeline = self._summary(name), catalog.entry(name).pipeline
        if pipeline is not None:
            admission = self.inference.admission_of(pipeline)
            load = {
                "in_flight": admission.model_queue.limit.value,
                "adapts": pipeline.spec.model not in catalog.oip_models.in_flight,
                "queue": admission.own.max_waiting,
                "per_key": admission.per_key,
                "body_bytes": self.limits.of(pipeline).max_body_bytes,
            }
            template = next(filter(None, (layer.samples_of(pipeline) for layer in self.layers)), SAMPLES)
            host, scope = exchange.header(b"host") or "", exchange.scope  # the address that the caller used, if valid
            host = host if _HOST.fullmatch(host) else "{}:{}".format(*scope["server"])
            base_url, with_key = f"{scope['scheme']}://{host}", exchange.key is not ANYONE
            samples = samples_of(pipeline, base_url, template, with_key=with_key)
            described |= compiled_members(pipeline, load) | {"samples": samples}
        return JsonResponse(described)

    def _summary(self, name: str) -> dict[str, Any]:
        """The members of a ``PipelineSummary``, and what the layers tell of the pipeline."""
        entry = self._catalog.entry(name)
        members = {
            "name": name,
            "description": entry.spec.description,
            "model": entry.spec.model,
            "state": entry.state,
            "state_detail": entry.state_detail,
            **({"decoupled": entry.pipeline.config.decoupled} if entry.pipeline else {}),
            "streams": entry.spec.stream is not None and entry.spec.takes_requests,
            "url": f"/v1/pipelines/{name}",
            **({"missing_at": absences} if (absences := self._catalog.absences(entry.spec)) else {}),
        }
        return members | {key: value for layer in self.layers for key, value in layer.flags_of(entry.spec).items()}

    async def get_example(self, exchange: Exchange, found: Found) -> Response:
        """An example of a request.

        The answer is the body of a valid request, with the content of its files in base64.
        """
        name, example = found["name"], found["example"]
        check_pipeline(exchange, self._catalog, name)
        pipeline = self._catalog.pipeline(name)
        declared, limits = examples.declared_requests(pipeline.spec), self.limits.of(pipeline)
        if example not in declared:
            raise UnknownExample(f"The pipeline has no such example{nearest(example, list(declared))}")
        try:  # reads the files again each time, so that a changed file needs no reload
            body = await asyncio.to_thread(
                examples.body_of, pipeline, declared[example], self._catalog.folder, limits.max_body_bytes
            )
        except (OSError, TypeError, ValueError) as exc:
            _log.warning("the example '%s' of pipeline '%s' cannot be sent: %s", example, pipeline.name, exc)
            raise UnknownExample("A file of this example cannot be read; see the log for the cause.") from exc
        if len(body) > limits.max_body_bytes:
            raise UnknownExample(f"This example is larger than {limits.body_key}, so it cannot be sent.")
        exchange.hold(len(body))  # it has the size of a body
        return Response(body, media_type="application/json")

    async def statistics(self, exchange: Exchange, _found: Found) -> Response:
        """Requests and durations of each pipeline.

        Counters since the start of the gateway, summed over its processes. Subtract two answers for rates.
        """
        key, known = exchange.key, await self._statistics.current()
        allowed = [name for name in self._catalog.entries if key.allows(name)]
        return JsonResponse(
            replace(known, pipelines={name: known.pipelines.get(name) or no_requests() for name in allowed})
        )

    async def findings(self, exchange: Exchange, _found: Found) -> Response:
        """What `triton-gateway check` finds in the models.

        Mistakes in the running models and in gateway.yaml, each with its solution.
        """
        found, key, catalog = await self._findings.current(), exchange.key, self._catalog
        folder = "" if catalog.file is None else f"{catalog.file.path.parent}/"  # answers have no paths of the machine
        listed = [
            FindingAnswer(
                severity=check_of(each).severity,
                solution=check_of(each).solution,
                **asdict(replace(each, text=each.text.replace(folder, ""))),
            )
            for each in found
        ]
        if key.pipelines is not None:
            entries = [entry for name, entry in catalog.entries.items() if key.allows(name)]
            models = {entry.spec.model for entry in entries}
            models |= {model for entry in entries if entry.pipeline for model in entry.pipeline.graph.models}
            # Texts suggest no names, which may be of the models of other pipelines.
            listed = [
                replace(each, text=without_nearest(each.text))
                for each in listed
                if (each.model in models if each.pipeline is None else key.allows(each.pipeline))
            ]
        return JsonResponse(FindingList(listed))


def compiled_members(pipeline: Pipeline, load_limits: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a ``PipelineDescription`` that follow from the pipeline's model."""
    spec, files, mapping = pipeline.spec, {field.name for field in pipeline.inputs if field.is_file}, pipeline.openai
    values = examples.example_of(pipeline).items()  # of a form, without files and long lists
    sample = {name: value for name, value in values if name not in files and not isinstance(value, examples.Filled)}
    limits = {"timeout_s": pipeline.timeout_s, **load_limits}
    if spec.stream is not None:
        limits["stream"] = spec.stream.model_dump() | {"first_output_s": spec.stream.longest_first_s}
    forms: dict[str, OpenAIForm] = {}
    if mapping is not None:
        counts_tokens = pipeline.usage is not None
        for kind, form in {"chat": mapping.chat, "completions": mapping.completions}.items():
            if form:
                forms[kind] = OpenAIForm(form.prompt, form.field_by_parameter, counts_tokens)
        if (vectors := mapping.embeddings) is not None:
            forms["embeddings"] = OpenAIForm(vectors.input, vectors.field_by_parameter, counts_tokens)

    def described(field: InputField | OutputField) -> dict[str, Any]:
        return {
            "name": field.name,
            "description": field.spec.description,
            "kind": field.spec.kind,
            "tensor": field.tensor.name,
            "datatype": field.tensor.datatype,
            "shape": field.tensor.dims,
        }

    return {
        "version": spec.version or None,
        "inputs": [
            PipelineInput(**described(field), required=field.is_required, default=field.spec.default)
            for field in pipeline.inputs
        ],
        "parameters": [
            {"name": field.name, "required": field.is_required}
            | field.spec.model_dump(exclude_none=True, exclude=_OF_THE_MODEL)
            for field in pipeline.parameters
        ],
        "outputs": [
            PipelineOutput(**described(field), join=field.join if pipeline.config.decoupled else None)
            for field in pipeline.outputs
        ],
        "graph": graph_described(pipeline),
        "early_exit": spec.reasons,
        **({"openai": forms} if forms else {}),
        "limits": limits,
        "schemas": {
            "request": examples.request_schema(pipeline),
            "result": examples.result_schema(pipeline),
            "output_event": examples.event_schema(pipeline) if spec.stream is not None else None,
        },
        "sample": sample,
        "examples": [
            PipelineExample(name, {field: values[field] for field in examples.paths_in(pipeline, values)})
            for name, values in examples.declared_requests(spec).items()
        ],
    }


def graph_described(pipeline: Pipeline) -> dict[str, Any]:
    """In ``edges`` and ``exits``, ``step`` is null for the request, and in ``edges`` for the response."""

    def model(config: ModelConfig, version: str = "") -> dict[str, Any]:
        """``version`` is null for the latest version."""
        inputs, outputs = (
            [
                {"name": spec.name, "datatype": spec.datatype, "shape": spec.dims, "optional": spec.optional}
                for spec in specs
            ]
            for specs in (config.inputs, config.outputs)
        )
        return {
            "model": config.name,
            "version": version or None,
            "backend": config.backend,
            "decoupled": config.decoupled,
            "max_batch_size": config.max_batch_size,
            "instances": config.instance_count,
            "inputs": inputs,
            "outputs": outputs,
        }

    def end(end: EdgeEnd) -> dict[str, Any]:
        return {"step": end.step.name if end.step else None, "tensor": end.tensor.name}

    graph, specs = pipeline.graph, pipeline.spec.steps or {}
    declared = {  # with the keys of gateway.yaml
        name: spec.model_dump(include={"when", "after", "each", "optional"}, by_alias=True, exclude_defaults=True)
        for name, spec in specs.items()
    }
    return {
        "steps": [
            {"name": step.name}
            | ({"ensemble": step.ensemble} if step.ensemble else {})
            | ({"part_of": step.part_of} if step.part_of not in ("", step.name) else {})
            | declared.get(step.part_of, {})
            | model(step.config, step.version)
            | {"calls": [model(config) for config in step.calls]}
            for step in graph.steps
        ],
        "edges": [
            {
                "from": end(edge.source),
                "to": end(edge.target),
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
        ]
        + [
            {"step": step, "reason": spec.exit, "name": name, "when": declared[name]["when"]}
            for name, spec in specs.items()
            if spec.exit is not None and spec.when is not None
            for step in dict.fromkeys(
                end(each)["step"] for tensor in spec.when.names() for each in graph.written.get(tensor, ())
            )
            or [None]
        ],
    }


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
        yield from (step.name for step in graph.steps if rule.reason in step.config.names_in("early_exits"))


def samples_of(pipeline: Pipeline, base_url: str, template: str = SAMPLES, *, with_key: bool = False) -> dict[str, str]:
    """``with_key``: the calls send the key that the variable API_KEY of the environment holds.

    The body is the pipeline's example: a form if it has files, otherwise JSON.
    """
    body, names = examples.example_of(pipeline), examples.file_names_of(pipeline)
    # In other paths, curl would read ``;`` and ``,`` as the start of options.
    files = [
        (name, path, path if _PLAIN_PATH.fullmatch(path) else json.dumps(path, ensure_ascii=False), Path(path).name)
        for name, paths in names.items()
        for path in paths
    ]
    texts = {
        name: value.nested() if isinstance(value, examples.Filled) else value
        for name, value in body.items()
        if names and name not in names and value is not None
    }

    def javascript(value: Any) -> str:
        shape, element = (value.shape, value.element) if isinstance(value, examples.Filled) else ((), value)
        return functools.reduce(lambda text, size: f"Array({size}).fill({text})", reversed(shape), json.dumps(element))

    calls: Any = _TEMPLATES.get_template(template).make_module(
        {
            "base_url": base_url,
            "url": f"{base_url}/v1/pipelines/{pipeline.name}",
            "with_key": with_key,
            "streams": pipeline.spec.stream is not None,
            "body": body,
            "is_large": not names and any(isinstance(value, examples.Filled) for value in body.values()),
            "members": [f"{json.dumps(name)}: {javascript(value)}" for name, value in body.items()],
            "files": files,
            "fields": {name: text if isinstance(text, str) else json.dumps(text) for name, text in texts.items()},
        }
    )
    samples = {name: getattr(calls, name)().strip() for name in ("curl", "javascript", "python", "curl_stream")}
    return {name: text for name, text in samples.items() if text}
