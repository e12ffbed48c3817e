"""Runs every check over a repository's models and gateway.yaml.

The checks of folders, of declared sizes, and of pipelines against their models are here; those of ensembles are in
``ensembles.py``. docs/how-to/llm-backends.md describes the LLM backends.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from app.codecs.kinds import shape_text
from app.config.document import Location
from app.config.mismatch import PipelineMismatch
from app.core.errors import GatewayError
from app.core.files import read_regular_file
from app.core.model import Finding, ModelConfig, RepositoryModel, reached
from app.core.text import nearest
from app.lint.ensembles import Models, decoupled_models, findings_of_ensembles, is_auto_completed
from app.lint.findings import WAYS_TO_JOIN_REQUESTS, Severity, checks
from app.pipelines.examples import MAX_FILE_BYTES, body_with, declared_requests, paths_in
from app.pipelines.file import GatewayFile, derived_spec, left_out, resolved, with_recognized_preset
from app.pipelines.llm_spec import preset_of, recognized
from app.pipelines.openai_mapping import SKIPS_SPECIAL_TOKENS
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.spec import SAMPLE, PipelineSpec
from app.steps.plan import Plan

BACKENDS = (
    *("ensemble", "python", "onnxruntime", "tensorrt", "pytorch", "tensorflow", "openvino", "vllm", "tensorrtllm"),
    *("dali", "fil", "identity", "repeat", "square"),
)
"""The backends of NVIDIA's images."""
LARGEST_BATCH = 65_536
MOST_ELEMENTS = 2**31 - 1
MAX_FINDINGS = 1000
HEALTH_CHECK = "ENABLE_VLLM_HEALTH_CHECK"
_JOIN_REQUESTS_THEMSELVES = ("vllm", "tensorrtllm")
_ANY_KEY = b"only to compile: what it is matters to no check"


def check(repository: Sequence[RepositoryModel], file: GatewayFile | None = None) -> list[Finding]:
    """``file`` None: only the models are checked. Returns at most MAX_FINDINGS."""
    return list(islice(_findings(repository, file), MAX_FINDINGS))


def _findings(repository: Sequence[RepositoryModel], file: GatewayFile | None) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    readable = {model.folder: model.config for model in repository if not model.complaint}
    decoupled = decoupled_models(models)
    declared = {} if file is None else file.spec.pipelines
    for model in repository:
        yield from _of_folder(model)
    yield from findings_of_ensembles(repository, declared)
    pipelines: list[tuple[str | None, PipelineSpec]] = [*declared.items()]
    if file is None:
        pipelines = [(None, derived_spec(model)) for model in readable]
    for pipeline, given in pipelines:
        if (found := readable.get(given.model)) is None:
            continue
        faults, spec = [*given.findings(pipeline, found, readable)], with_recognized_preset(given, found)
        if spec.preset is not None and not is_auto_completed(found):
            faults += _of_preset(spec, found, is_decoupled=spec.model in decoupled)
        yield from (replace(each, model=spec.model, pipeline=pipeline) for each in faults)
    if file is not None:
        yield from _file_faults(file, readable, models.keys() - readable.keys())


def _of_folder(model: RepositoryModel) -> Iterator[Finding]:
    """Checks a model by itself: its files, its backend, and the dimensions and batches that it declares."""
    name, backend = model.folder, model.backend or model.config.backend
    if model.complaint:
        yield Finding("unreadable-config", model.complaint, name)
    elif model.config.name != name:
        text = f"the folder is '{name}' but config.pbtxt has name: '{model.config.name}'"
        yield Finding("folder-name", text, name)
    yield from model.findings
    if model.versions and model.backend and backend not in BACKENDS:
        text = f"backend '{backend}' is not one of NVIDIA's images, and Triton needs it installed"
        yield Finding("unknown-backend", text + nearest(backend, BACKENDS), name)
    if backend == "vllm" and model.config.parameter(HEALTH_CHECK).lower() != "true":
        text = f"a dead engine stays ready in Triton: set the parameter {HEALTH_CHECK} to true"
        yield Finding("no-health-check", text, name)
    config = model.config
    if model.complaint:
        return
    if config.max_batch_size < 0:
        text = f"max_batch_size is {config.max_batch_size}, and must be 0 or more"
        yield Finding("invalid-size", text, name)
    if config.max_batch_size > LARGEST_BATCH:
        text = f"max_batch_size is {config.max_batch_size}, more than {LARGEST_BATCH}"
        yield Finding("excessive-size", text, name)
    for spec in (*config.inputs, *config.outputs):
        text = f"'{spec.name}' has the dims {shape_text(spec.dims)}"
        if any(dim < 1 and dim != -1 for dim in spec.dims):
            text = f"{text}: each must be 1 or more, or -1 for any size"
            yield Finding("invalid-size", text, name, tensor=spec.name)
        elif math.prod(dim for dim in spec.dims if dim > 0) > MOST_ELEMENTS:
            text = f"{text}: more than {MOST_ELEMENTS} elements"
            yield Finding("excessive-size", text, name, tensor=spec.name)


def _of_preset(spec: PipelineSpec, config: ModelConfig, *, is_decoupled: bool) -> Iterator[Finding]:
    assert spec.preset is not None
    (tensors, fields), other = left_out(spec, config), recognized(config)
    if tensors:
        *first, last = [f"'{name}'" for name in tensors]
        named = f"{', '.join(first)} and {last}" if first else last
        text = f"the preset {spec.preset} uses {named}, which the model does not have"
        text += f": the pipeline has no {', '.join(fields)}" if fields else ""
        text += f"; the model has the tensors of the preset {other}" if other not in (None, spec.preset) else ""
        yield Finding("preset-mismatch", text)
    if spec.stream is None:
        return
    parameter = preset_of(spec.preset).accumulates_if
    if not is_decoupled:
        where = "model.yaml" if spec.preset == "tensorrt_llm_api" else "config.pbtxt"
        text = f"the model is not decoupled, so a stream has one output: write `decoupled: true` in {where}"
        yield Finding("not-decoupled", text)
    elif parameter and not any(each.accumulates for each in (resolved(spec, config).outputs or {}).values()):
        remedy = "use tensorrt_llm_bls with" if config.is_ensemble else "set"
        text = f"each token becomes a text of its own, which splits characters: {remedy} {parameter}: true"
        yield Finding("split-characters", text)


def _file_faults(file: GatewayFile, models: Models, unreadable: Set[str]) -> Iterator[Finding]:
    """``unreadable``: the models that are there, but not in ``models``; they have a finding of their own."""
    for name, spec in file.spec.pipelines.items():
        for each in _mismatches_of(name, spec, models, unreadable, file.path.parent):
            complaint = file.complaint(("pipelines", name, *each.location), each.text)
            yield Finding(each.code, complaint, spec.model or None, pipeline=name)
        for model in {model for model, _ in spec.called if model in models and is_auto_completed(models[model])}:
            text = "relies on auto-completion: its fields are not checked (to check them, use --triton)"
            yield Finding("unknown-edge", f"pipeline '{name}' {text}", model, pipeline=name)
    listed, of_steps = file.spec.oip.models if file.spec.oip is not None else [], file.spec.of_steps
    for index, model in enumerate(sorted(of_steps) if listed == "all" else listed):
        is_known, text = model in models or model in unreadable, ""
        if model in of_steps and is_known:
            text = f"'{model}' is also a pipeline with steps, which hides the model: rename the pipeline"
        elif model not in of_steps and not is_known:
            text = _no_model(model, [*models, *of_steps])
        if text:
            location = ("oip", "models") if listed == "all" else ("oip", "models", index)
            yield Finding("gateway-yaml", file.complaint(location, text), model)
    for index, code in enumerate(file.spec.accept):
        if code not in checks() or checks()[code].severity is Severity.ERROR:
            text = "is an error: mend it"
            text = text if code in checks() else f"is not the code of a finding{nearest(code, checks())}"
            yield Finding("gateway-yaml", file.complaint(("accept", index), text))
    for name, spec in file.spec.pipelines.items():
        yield from _risks(name, spec, models)


def _absent_models(spec: PipelineSpec, models: Models, unreadable: Set[str]) -> Iterator[PipelineMismatch]:
    """The models that the pipeline names and the repository does not have."""
    places = {model: location for (model, _), location in spec.called.items()}
    for model, location in places.items():
        if model not in models and model not in unreadable:
            yield PipelineMismatch(location, _no_model(model, models))
    cancel = spec.cancel
    if cancel is not None and places.keys() <= models.keys() and cancel.model not in unreadable:
        called = models.get(cancel.model)
        if called is None:
            yield PipelineMismatch(("cancel", "model"), _no_model(cancel.model, models))
        elif cancel.input not in {each.name for each in called.inputs} and not is_auto_completed(called):
            near = nearest(cancel.input, [each.name for each in called.inputs])
            text = f"'{cancel.input}' is not an input of '{cancel.model}'{near}"
            yield PipelineMismatch(("cancel", "input"), text)
    for index, step in enumerate(spec.rejects_input):
        if step not in models and step not in unreadable and places.keys() <= models.keys():
            yield PipelineMismatch(("rejects_input", index), _no_model(step, models))


def _mismatches_of(
    name: str, spec: PipelineSpec, models: Models, unreadable: Set[str], folder: Path
) -> Iterator[PipelineMismatch]:
    yield from _absent_models(spec, models, unreadable)
    called = {model for model, _ in spec.called}
    if not called <= models.keys() or any(is_auto_completed(models[model]) for model in called):
        return
    try:
        config = spec.config_of(name, models)
        below = {each.name: each for each in reached(config, models)}
        pipeline = Pipeline(name, spec, config, below, CompileContext(early_exit_key=_ANY_KEY))
    except PipelineMismatch as exc:
        yield exc
        return
    for step in config.order if isinstance(config, Plan) else ():
        if step.spec.model is not None and not step.outputs:
            text = "is read by no other step, no condition and not by the answer"
            yield PipelineMismatch(("steps", step.name), text, "unread-tensor")
    for request, values in declared_requests(pipeline.spec).items():
        key = (SAMPLE,) if request == SAMPLE else ("examples", request)
        for location, text in _faults_of_request(pipeline, values, folder):
            yield PipelineMismatch((*key, *location), text, "sample")


def _faults_of_request(pipeline: Pipeline, values: Mapping[str, Any], folder: Path) -> Sequence[tuple[Location, str]]:
    """Checks that the files of a ``sample`` or an example can be read, and that the pipeline accepts its values."""
    contents, known = dict[str, list[bytes]](), pipeline.fields
    faults: list[tuple[Location, str]] = [
        ((name,), f"is not a field of the pipeline{nearest(name, known)}") for name in values if name not in known
    ]
    for name, path in ((name, path) for name, paths in paths_in(pipeline, values).items() for path in paths):
        try:
            contents.setdefault(name, []).append(read_regular_file(folder / path, MAX_FILE_BYTES))
        except OSError as exc:
            faults.append(((name,), f"names a file that cannot be read: {folder / path}: {exc.strerror or exc}"))
    if faults:
        return faults
    try:
        pipeline.probe_of(body_with(pipeline, values, contents))
    except GatewayError as exc:
        return [((each.field,), each.problem) for each in exc.errors] or [((), exc.detail)]
    except (TypeError, ValueError) as exc:
        return [((), f"cannot be sent: {exc}")]
    return ()


def _no_model(name: str, models: Iterable[str]) -> str:
    return f"'{name}' is not a model in the repository{nearest(name, sorted(models))}"


def _risks(name: str, spec: PipelineSpec, models: Models) -> Iterator[Finding]:
    """Settings that load but can cause problems."""
    cancel = spec.cancel.model if spec.cancel else ""
    count = models[cancel].instance_count if cancel in models else 1
    if count > 1:
        text = f"which has {count} instances: the call may reach the wrong instance; use one instance"
        text = f"pipeline '{name}' cancels by a call to '{cancel}', {text}"
        yield Finding("cancel-instances", text, cancel, pipeline=name)
    format_ = spec.openai.format_of_special_tokens if spec.openai is not None else None
    if format_ is not None and SKIPS_SPECIAL_TOKENS not in spec.parameters:
        text = (
            f"pipeline '{name}' reads the special tokens of '{format_}', and has no parameter "
            f"'{SKIPS_SPECIAL_TOKENS}': if the backend removes them from the text, no call or reasoning is found"
        )
        yield Finding("special-tokens", text, spec.model, pipeline=name)
    batched = {each.model for each in (spec.steps or {}).values() if each.each}
    called = [models[model] for model, _ in spec.called if model in models and model not in batched]
    if spec.joins_requests or any(with_recognized_preset(spec, each).preset is not None for each in called):
        return
    steps = list(dict.fromkeys(step for each in called for step in reached(each, models, by_steps=True)))
    if any(each.decoupled or each.sequence is not None or is_auto_completed(each) for each in steps):
        return
    for model in steps:
        is_joined = model.is_ensemble or model.joins_requests or model.backend in _JOIN_REQUESTS_THEMSELVES
        if model.max_batch_size > 1 and not is_joined:
            text = f"although it takes {model.max_batch_size} items at a time: {WAYS_TO_JOIN_REQUESTS}"
            text = f"runs each request of pipeline '{name}' alone, {text}"
            yield Finding("batches-of-one", text, model.name, pipeline=name)
