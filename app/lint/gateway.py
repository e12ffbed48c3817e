"""Checks of gateway.yaml against the models of a repository.

Checks of each pipeline's ``sample`` and ``examples``: their files can be read, and the pipeline accepts them.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import suppress

from app.config.document import read_regular_file
from app.core.errors import GatewayError
from app.core.model import ModelConfig, reached
from app.core.text import nearest
from app.lint.ensembles import Models, is_auto_completed
from app.lint.findings import Code, Finding
from app.pipelines.coalescing import coalescing_of
from app.pipelines.compile import CompileContext, compile_pipeline
from app.pipelines.examples import MAX_FILE_BYTES, Values, body_with, paths_in
from app.pipelines.file import GatewayFile
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.openai_mapping import SKIPS_SPECIAL_TOKENS
from app.pipelines.pipeline import Pipeline
from app.pipelines.resolve import with_recognized_preset
from app.pipelines.sessions import session_terms_of
from app.pipelines.spec import PipelineSpec

Misfit = tuple[tuple[str, ...], str]
"""The path of a key within the request, and a description of the problem."""


def sample_misfits(file: GatewayFile, pipeline: Pipeline) -> Iterator[Finding]:
    spec = pipeline.spec
    if spec.sample is not None:
        yield from _misfits(file, pipeline, ("sample",), spec.sample)
    for name, values in spec.examples.items():
        yield from _misfits(file, pipeline, ("examples", name), values)


def _misfits(file: GatewayFile, pipeline: Pipeline, key: tuple[str, ...], values: Values) -> Iterator[Finding]:
    """``key``: where the pipeline declares the request with these values."""
    files, unreadable = _read_files(file, pipeline, values)
    misfits = [*_unknown_fields(pipeline, values), *unreadable]
    for location, text in misfits or _refusals(pipeline, values, files):
        complaint = file.complaint(("pipelines", pipeline.name, *key, *location), text)
        yield Finding(Code.SAMPLE, complaint, model=pipeline.spec.model, pipeline=pipeline.name)


def _unknown_fields(pipeline: Pipeline, values: Values) -> Iterator[Misfit]:
    names = [*(field.name for field in pipeline.inputs), *(field.name for field in pipeline.parameters)]
    for name in values:
        if name not in names:
            yield (name,), f"is not a field of the pipeline{nearest(name, names)}"


def _read_files(file: GatewayFile, pipeline: Pipeline, values: Values) -> tuple[dict[str, bytes], list[Misfit]]:
    """Returns the content of the files by field name, and the files that cannot be read."""
    contents: dict[str, bytes] = {}
    unreadable: list[Misfit] = []
    for name, relative_path in paths_in(pipeline, values).items():
        path = file.path.parent / relative_path
        try:
            contents[name] = read_regular_file(path, MAX_FILE_BYTES)
        except OSError as exc:
            unreadable.append(((name,), f"names a file that cannot be read: {path}: {exc.strerror or exc}"))
    return contents, unreadable


def _refusals(pipeline: Pipeline, values: Values, files: Mapping[str, bytes]) -> Iterator[Misfit]:
    try:
        pipeline.probe_of(body_with(pipeline, values, files))
    except GatewayError as exc:
        misfits: list[Misfit] = [((each.field,), each.problem) for each in exc.errors]
        yield from misfits or [((), exc.detail)]
    except (TypeError, ValueError) as exc:
        yield (), f"cannot be sent: {exc}"


_ANY_KEY = b"only to compile: what it is matters to no check"


def misfits(file: GatewayFile, models: Models, unreadable: Set[str]) -> Iterator[Finding]:
    """``unreadable``: the models that are there, but not in ``models``."""
    for name, spec in file.spec.pipelines.items():
        for location, text in _misfits_of(name, spec, models, unreadable):
            complaint = file.complaint(("pipelines", name, *location), text)
            yield Finding(Code.GATEWAY_YAML, complaint, model=spec.model or None, pipeline=name)
        if spec.model in models:
            yield from _fields(name, spec, file, models)
    listed = file.spec.oip.models if file.spec.oip is not None and file.spec.oip.models != "all" else []
    for index, model in enumerate(listed):
        if model not in models and model not in unreadable:
            complaint = file.complaint(("oip", "models", index), _no_model(model, models))
            yield Finding(Code.GATEWAY_YAML, complaint, model=model)


def _fields(name: str, spec: PipelineSpec, file: GatewayFile, models: Models) -> Iterator[Finding]:
    if is_auto_completed(models[spec.model]):
        text = f"pipeline '{name}' relies on auto-completion: its fields are not checked (to check them, use --triton)"
        yield Finding(Code.UNKNOWN_EDGE, text, spec.model, pipeline=name)
        return
    with suppress(PipelineMismatch):  # is a finding of its own
        yield from sample_misfits(file, _compiled(name, spec, models))


def cancel_instances(file: GatewayFile, models: Models) -> Iterator[Finding]:
    for name, spec in file.spec.pipelines.items():
        model = spec.cancel.model if spec.cancel else ""
        count = models[model].instance_count if model in models else 1
        if count > 1:
            text = (
                f"pipeline '{name}' cancels by a call to '{model}', which has {count} instances: the call may reach "
                "the wrong instance; use one instance"
            )
            yield Finding(Code.CANCEL_INSTANCES, text, model, pipeline=name)


_JOIN_REQUESTS_THEMSELVES = ("vllm", "tensorrtllm")


def batches_of_one(file: GatewayFile, models: Models) -> Iterator[Finding]:
    """Checks for models that take batches, although neither Triton nor the gateway joins requests to batches.

    LLM backends join requests themselves.
    """
    for name, spec in file.spec.pipelines.items():
        config = models.get(spec.model)
        if config is None or spec.coalesce is not None or with_recognized_preset(spec, config).preset is not None:
            continue
        steps = reached(config, models, lambda each: [step.model for step in each.steps])
        if any(each.decoupled or each.sequence is not None or is_auto_completed(each) for each in steps):
            continue
        for model in steps:
            is_joined = model.is_ensemble or model.joins_requests or model.backend in _JOIN_REQUESTS_THEMSELVES
            if model.max_batch_size > 1 and not is_joined:
                yield Finding(Code.BATCHES_OF_ONE, _alone(name, model), model.name, pipeline=name)


def _alone(pipeline: str, model: ModelConfig) -> str:
    return (
        f"runs each request of pipeline '{pipeline}' alone, although it takes {model.max_batch_size} items at a time: "
        "`dynamic_batching` would join requests in Triton, `coalesce` would join them in the gateway"
    )


def special_tokens(file: GatewayFile) -> Iterator[Finding]:
    for name, spec in file.spec.pipelines.items():
        format_ = spec.openai.format_of_special_tokens if spec.openai is not None else None
        if format_ is not None and SKIPS_SPECIAL_TOKENS not in spec.parameters:
            text = (
                f"pipeline '{name}' reads the special tokens of '{format_}', and has no parameter "
                f"'{SKIPS_SPECIAL_TOKENS}': if the backend removes them from the text, no call or reasoning is found"
            )
            yield Finding(Code.SPECIAL_TOKENS, text, spec.model, pipeline=name)


def _misfits_of(
    name: str, spec: PipelineSpec, models: Models, unreadable: Set[str]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if spec.model not in models:
        if spec.model not in unreadable:
            yield ("model",), _no_model(spec.model, models)
        return
    if spec.cancel is not None and spec.cancel.model not in unreadable:
        yield from _cancel_misfits(spec, models)
    for index, step in enumerate(spec.rejects_input):
        if step not in models and step not in unreadable:
            yield ("rejects_input", index), _no_model(step, models)
    if not is_auto_completed(models[spec.model]):
        try:
            _compiled(name, spec, models)
            coalescing_of(spec, models[spec.model], models)
            session_terms_of(spec, models[spec.model], models)
        except PipelineMismatch as exc:
            yield exc.location, exc.text


def _compiled(name: str, spec: PipelineSpec, models: Models) -> Pipeline:
    """Raises PipelineMismatch."""
    return compile_pipeline(name, spec, models[spec.model], {}, CompileContext(early_exit_key=_ANY_KEY))


def _cancel_misfits(spec: PipelineSpec, models: Models) -> Iterator[tuple[tuple[str | int, ...], str]]:
    cancel = spec.cancel
    if cancel is None:
        return
    config = models.get(cancel.model)
    if config is None:
        yield (
            ("cancel", "model"),
            f"'{cancel.model}' is not a model in the repository{nearest(cancel.model, list(models))}",
        )
    elif config.input(cancel.input) is None and not is_auto_completed(config):
        inputs = [each.name for each in config.inputs]
        yield (
            ("cancel", "input"),
            f"'{cancel.input}' is not an input of '{cancel.model}'{nearest(cancel.input, inputs)}",
        )


def _no_model(name: str, models: Models) -> str:
    return f"'{name}' is not a model in the repository{nearest(name, sorted(models))}"
