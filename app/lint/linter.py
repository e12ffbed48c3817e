"""Runs every check over a repository's models and gateway.yaml.

The checks of models' folders, of declared sizes, and of differences between Tritons are in this module; the other
checks are in the module of their subject.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from app.codecs.kinds import shape_text
from app.core.engine import InferenceServer
from app.core.model import ModelConfig, RepositoryModel
from app.core.text import nearest
from app.lint.cycles import model_cycles, parallel_failures, tensor_cycles
from app.lint.ensembles import (
    Wiring,
    decoupled_models,
    edge_faults,
    omitted_inputs,
    step_faults,
    stream_faults,
    tensor_faults,
)
from app.lint.findings import Finding
from app.lint.pipeline_checks import HEALTH_CHECK, Declared, file_faults, pipeline_faults
from app.pipelines.file import GatewayFile
from app.pipelines.resolve import derived_spec

BACKENDS = (
    *("ensemble", "python", "onnxruntime", "tensorrt", "pytorch", "tensorflow", "openvino", "vllm", "tensorrtllm"),
    *("dali", "fil", "identity", "repeat", "square"),
)
"""Those of NVIDIA's images."""
LARGEST_BATCH = 65_536
MOST_ELEMENTS = 2**31 - 1
MAX_FINDINGS = 1000


def check(repository: Sequence[RepositoryModel], file: GatewayFile | None = None) -> list[Finding]:
    """``file`` None: only the models are checked. Returns at most MAX_FINDINGS."""
    return list(islice(_findings(repository, file), MAX_FINDINGS))


def compare(engine: InferenceServer, repository: Iterable[RepositoryModel]) -> Iterator[Finding]:
    """Compares the signatures of models between several Tritons.

    ``repository``: what the engine just said of its models.
    """
    for model in repository:
        for address, reason in engine.absences(model.config.name).items():
            if reason == "other_signature":
                text = f"has other inputs or outputs at {address} than on most Tritons, so it is not used there"
                yield Finding("other-signature", text, model.config.name)


def _findings(repository: Sequence[RepositoryModel], file: GatewayFile | None) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    versions = {model.folder: model.versions for model in repository}
    readable = {model.folder: model.config for model in repository if not model.complaint}
    ensembles = [model for model in repository if model.folder in readable and model.config.is_ensemble]
    wirings = [
        Wiring.of(model.config, readable)
        for model in ensembles
        # a step's map that lost entries would lead to other findings
        if all(each.code != "duplicate-key" for each in model.refusals)
    ]
    decoupled = decoupled_models(models)
    declared = {} if file is None else file.spec.pipelines
    for model in repository:
        yield from _of_folder(model)
    for name, config in readable.items():
        yield from _sizes(name, config)
    yield from model_cycles(repository)
    for wiring in wirings:
        yield from step_faults(wiring, models, versions)
        yield from tensor_faults(wiring)
        yield from tensor_cycles(wiring)
        yield from edge_faults(wiring)
        yield from stream_faults(wiring, decoupled)
    yield from parallel_failures(wirings, repository, declared)
    yield from omitted_inputs(models, wirings, declared.values())
    pipelines: list[Declared] = [(name, spec) for name, spec in declared.items() if spec.model in readable]
    if file is None:
        pipelines = [(None, derived_spec(model)) for model in readable]
    yield from pipeline_faults(pipelines, readable, decoupled)
    if file is not None:
        yield from file_faults(file, readable, models.keys() - readable.keys())


def _of_folder(model: RepositoryModel) -> Iterator[Finding]:
    name, backend = model.folder, model.backend or model.config.backend
    if model.complaint:
        yield Finding("unreadable-config", model.complaint, name)
    elif model.config.name != name:
        text = f"the folder is '{name}' but config.pbtxt has name: '{model.config.name}'"
        yield Finding("folder-name", text, name)
    for refusal in model.refusals:
        yield Finding(refusal.code, refusal.text, name, refusal.step)
    if model.versions:
        if model.backend and backend not in BACKENDS:
            text = f"backend '{backend}' is not one of NVIDIA's images, and Triton needs it installed"
            yield Finding("unknown-backend", text + nearest(backend, BACKENDS), name)
        for path in model.lacks:
            text = f"{path} does not exist: the Python backend needs this script in each version"
            yield Finding("missing-script", text, name)
        yield from (Finding("script-syntax", mistake, name) for mistake in model.mistakes)
    if backend == "vllm" and model.config.parameter(HEALTH_CHECK).lower() != "true":
        text = f"a dead engine stays ready in Triton: set the parameter {HEALTH_CHECK} to true"
        yield Finding("no-health-check", text, name)


def _sizes(model: str, config: ModelConfig) -> Iterator[Finding]:
    """Checks the dimensions and batches that a configuration declares."""
    if config.max_batch_size < 0:
        text = f"max_batch_size is {config.max_batch_size}, and must be 0 or more"
        yield Finding("invalid-size", text, model)
    if config.max_batch_size > LARGEST_BATCH:
        text = f"max_batch_size is {config.max_batch_size}, more than {LARGEST_BATCH}"
        yield Finding("excessive-size", text, model)
    for spec in (*config.inputs, *config.outputs):
        text = f"'{spec.name}' has the dims {shape_text(spec.dims)}"
        if any(dim < 1 and dim != -1 for dim in spec.dims):
            text = f"{text}: each must be 1 or more, or -1 for any size"
            yield Finding("invalid-size", text, model, tensor=spec.name)
        elif math.prod(dim for dim in spec.dims if dim > 0) > MOST_ELEMENTS:
            text = f"{text}: more than {MOST_ELEMENTS} elements"
            yield Finding("excessive-size", text, model, tensor=spec.name)
