"""Checks of pipelines against the models of a repository: their keys, samples, layers, batches and LLM backends.

docs/how-to/llm-backends.md describes the backends.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from app.config.document import Location, read_regular_file
from app.core.errors import GatewayError
from app.core.model import ModelConfig, reached
from app.core.text import nearest
from app.lint.ensembles import Models, is_auto_completed
from app.lint.findings import WAYS_TO_JOIN_REQUESTS, Finding
from app.pipelines.compile import CompileContext, compile_pipeline
from app.pipelines.examples import MAX_FILE_BYTES, Values, body_with, declared_requests, paths_in
from app.pipelines.file import GatewayFile
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.openai_mapping import SKIPS_SPECIAL_TOKENS
from app.pipelines.pipeline import Pipeline
from app.pipelines.preset import preset_of, recognized
from app.pipelines.resolve import left_out, resolved, with_recognized_preset
from app.pipelines.spec import SAMPLE, PipelineSpec

Declared = tuple[str | None, PipelineSpec]
"""The name in gateway.yaml, or None without a file, and the declaration."""
Fault = tuple[str, str]
"""The code and the text of a finding."""
Misfit = tuple[Location, str]
"""The path of a key, and a description of the problem."""

HEALTH_CHECK = "ENABLE_VLLM_HEALTH_CHECK"
_JOIN_REQUESTS_THEMSELVES = ("vllm", "tensorrtllm")
_ANY_KEY = b"only to compile: what it is matters to no check"


def pipeline_faults(pipelines: Iterable[Declared], models: Models, decoupled: Set[str]) -> Iterator[Finding]:
    """Checks layers and presets. ``decoupled``: the models that are, as decoupled_models finds them."""
    for pipeline, given in pipelines:
        config = models[given.model]
        faults = list(given.findings(pipeline, config, models))
        spec = with_recognized_preset(given, config)
        if spec.preset is not None and not is_auto_completed(config):
            faults += _of_preset(spec, config, is_decoupled=spec.model in decoupled)
        yield from (Finding(code, text, spec.model, pipeline=pipeline) for code, text in faults)


def _of_preset(spec: PipelineSpec, config: ModelConfig, *, is_decoupled: bool) -> Iterator[Fault]:
    assert spec.preset is not None
    (tensors, fields), other = left_out(spec, config), recognized(config)
    if tensors:
        *first, last = [f"'{name}'" for name in tensors]
        named = f"{', '.join(first)} and {last}" if first else last
        text = f"the preset {spec.preset} uses {named}, which the model does not have"
        text += f": the pipeline has no {', '.join(fields)}" if fields else ""
        text += f"; the model has the tensors of the preset {other}" if other not in (None, spec.preset) else ""
        yield "preset-mismatch", text
    if spec.stream is None:
        return
    parameter = preset_of(spec.preset).accumulates_if
    if not is_decoupled:
        where = "model.yaml" if spec.preset == "tensorrt_llm_api" else "config.pbtxt"
        text = f"the model is not decoupled, so a stream has one output: write `decoupled: true` in {where}"
        yield "not-decoupled", text
    elif parameter and not any(each.accumulates for each in (resolved(spec, config).outputs or {}).values()):
        remedy = "use tensorrt_llm_bls with" if config.is_ensemble else "set"
        text = f"each token becomes a text of its own, which splits characters: {remedy} {parameter}: true"
        yield "split-characters", text


def file_faults(file: GatewayFile, models: Models, unreadable: Set[str]) -> Iterator[Finding]:
    """``unreadable``: the models that are there, but not in ``models``; they have a finding of their own."""
    for name, spec in file.spec.pipelines.items():
        for location, text in _misfits_of(name, spec, models, unreadable):
            complaint = file.complaint(("pipelines", name, *location), text)
            yield Finding("gateway-yaml", complaint, spec.model or None, pipeline=name)
        if spec.model not in models:
            continue
        if is_auto_completed(models[spec.model]):
            text = "relies on auto-completion: its fields are not checked (to check them, use --triton)"
            yield Finding("unknown-edge", f"pipeline '{name}' {text}", spec.model, pipeline=name)
        else:
            try:
                pipeline = _compiled(name, spec, models)
            except PipelineMismatch:  # is a finding of its own
                continue
            for request, values in declared_requests(pipeline.spec).items():
                key = (SAMPLE,) if request == SAMPLE else ("examples", request)
                for location, text in _misfits_of_request(pipeline, values, file.path.parent):
                    complaint = file.complaint(("pipelines", name, *key, *location), text)
                    yield Finding("sample", complaint, spec.model, pipeline=name)
    listed = file.spec.oip.models if file.spec.oip is not None and file.spec.oip.models != "all" else []
    for index, model in enumerate(listed):
        if model not in models and model not in unreadable:
            complaint = file.complaint(("oip", "models", index), _no_model(model, models))
            yield Finding("gateway-yaml", complaint, model)
    for name, spec in file.spec.pipelines.items():
        yield from (Finding(code, text, model, pipeline=name) for code, text, model in _risks(name, spec, models))


def _risks(name: str, spec: PipelineSpec, models: Models) -> Iterator[tuple[str, str, str]]:
    """Yields a code, a text and the model that it is about."""
    cancel = spec.cancel.model if spec.cancel else ""
    count = models[cancel].instance_count if cancel in models else 1
    if count > 1:
        text = f"which has {count} instances: the call may reach the wrong instance; use one instance"
        yield "cancel-instances", f"pipeline '{name}' cancels by a call to '{cancel}', {text}", cancel
    format_ = spec.openai.format_of_special_tokens if spec.openai is not None else None
    if format_ is not None and SKIPS_SPECIAL_TOKENS not in spec.parameters:
        text = (
            f"pipeline '{name}' reads the special tokens of '{format_}', and has no parameter "
            f"'{SKIPS_SPECIAL_TOKENS}': if the backend removes them from the text, no call or reasoning is found"
        )
        yield "special-tokens", text, spec.model
    config = models.get(spec.model)
    if config is None or spec.joins_requests or with_recognized_preset(spec, config).preset is not None:
        return
    steps = reached(config, models, by_steps=True)
    if any(each.decoupled or each.sequence is not None or is_auto_completed(each) for each in steps):
        return
    for model in steps:
        is_joined = model.is_ensemble or model.joins_requests or model.backend in _JOIN_REQUESTS_THEMSELVES
        if model.max_batch_size > 1 and not is_joined:
            text = f"although it takes {model.max_batch_size} items at a time: {WAYS_TO_JOIN_REQUESTS}"
            yield "batches-of-one", f"runs each request of pipeline '{name}' alone, {text}", model.name


def _misfits_of(name: str, spec: PipelineSpec, models: Models, unreadable: Set[str]) -> Iterator[Misfit]:
    if spec.model not in models:
        if spec.model not in unreadable:
            yield ("model",), _no_model(spec.model, models)
        return
    cancel = spec.cancel
    if cancel is not None and cancel.model not in unreadable:
        config = models.get(cancel.model)
        if config is None:
            yield ("cancel", "model"), _no_model(cancel.model, models)
        elif cancel.input not in {each.name for each in config.inputs} and not is_auto_completed(config):
            near = nearest(cancel.input, [each.name for each in config.inputs])
            yield ("cancel", "input"), f"'{cancel.input}' is not an input of '{cancel.model}'{near}"
    for index, step in enumerate(spec.rejects_input):
        if step not in models and step not in unreadable:
            yield ("rejects_input", index), _no_model(step, models)
    if not is_auto_completed(models[spec.model]):
        try:
            _compiled(name, spec, models)
            spec.layers_of(name, models[spec.model], models)
        except PipelineMismatch as exc:
            yield exc.location, exc.text


def _compiled(name: str, spec: PipelineSpec, models: Models) -> Pipeline:
    """Raises PipelineMismatch."""
    return compile_pipeline(name, spec, models[spec.model], {}, CompileContext(early_exit_key=_ANY_KEY))


def _no_model(name: str, models: Models) -> str:
    return f"'{name}' is not a model in the repository{nearest(name, sorted(models))}"


def _misfits_of_request(pipeline: Pipeline, values: Values, folder: Path) -> Sequence[Misfit]:
    """Checks that the files of a ``sample`` or an example can be read, and that the pipeline accepts its values."""
    names, contents = pipeline.reader.names, dict[str, bytes]()
    misfits: list[Misfit] = [
        ((name,), f"is not a field of the pipeline{nearest(name, names)}") for name in values if name not in names
    ]
    for name, path in paths_in(pipeline, values).items():
        try:
            contents[name] = read_regular_file(folder / path, MAX_FILE_BYTES)
        except OSError as exc:
            misfits.append(((name,), f"names a file that cannot be read: {folder / path}: {exc.strerror or exc}"))
    if misfits:
        return misfits
    try:
        pipeline.probe_of(body_with(pipeline, values, contents))
    except GatewayError as exc:
        return [((each.field,), each.problem) for each in exc.errors] or [((), exc.detail)]
    except (TypeError, ValueError) as exc:
        return [((), f"cannot be sent: {exc}")]
    return ()
