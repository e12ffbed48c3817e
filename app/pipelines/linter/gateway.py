"""Checks of gateway.yaml against the models of a repository."""

from collections.abc import Iterator
from contextlib import suppress

from app.domain.nearest import nearest
from app.pipelines.compile import Surroundings, compile_pipeline
from app.pipelines.file import GatewayFile
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.samples import sample_misfits
from app.pipelines.linter.wiring import Models, is_auto_completed
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec

_ANY_KEY = b"only to compile: what it is matters to no check"


def misfits(file: GatewayFile, models: Models) -> Iterator[Finding]:
    for name, spec in file.spec.pipelines.items():
        for location, text in _misfits_of(name, spec, models):
            complaint = file.complaint(("pipelines", name, *location), text)
            yield Finding(Code.GATEWAY_YAML, complaint, model=spec.model or None, pipeline=name)
        if spec.model in models and not is_auto_completed(models[spec.model]):
            with suppress(PipelineMismatch):  # one of the misfits above
                yield from sample_misfits(file, _compiled(name, spec, models))
    listed = file.spec.oip.models if file.spec.oip is not None and file.spec.oip.models != "all" else []
    for index, model in enumerate(listed):
        if model not in models:
            complaint = file.complaint(("oip", "models", index), _no_model(model, models))
            yield Finding(Code.GATEWAY_YAML, complaint, model=model)


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


def _misfits_of(name: str, spec: PipelineSpec, models: Models) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if spec.model not in models:
        yield ("model",), _no_model(spec.model, models)
        return
    yield from _cancel_misfits(spec, models)
    for index, step in enumerate(spec.rejects_input):
        if step not in models:
            yield ("rejects_input", index), _no_model(step, models)
    if not is_auto_completed(models[spec.model]):
        try:
            _compiled(name, spec, models)
        except PipelineMismatch as exc:
            yield exc.location, exc.text


def _compiled(name: str, spec: PipelineSpec, models: Models) -> Pipeline:
    """Raises PipelineMismatch."""
    return compile_pipeline(name, spec, models[spec.model], {}, Surroundings(early_exit_key=_ANY_KEY))


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
