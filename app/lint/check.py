"""Runs every check over a repository's models and gateway.yaml.

The checks of models' folders, of declared sizes, and of differences between Tritons are in this module; the other
checks are in the module of their subject.
"""

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

from app.codecs.kinds import shape_text
from app.core.engine import InferenceServer
from app.core.model import ModelConfig, ModelFiles, RepositoryModel
from app.core.text import nearest
from app.lint.backends import Declared, preset_faults, unwatched_engines
from app.lint.cycles import bls_cycles, ensemble_cycles, parallel_failures, reasons_to_fail, tensor_cycles
from app.lint.ensembles import (
    Models,
    Wiring,
    batch_sizes,
    decoupled_joins,
    decoupled_models,
    mismatches,
    omissible_outputs,
    omitted_inputs,
    routers_needed,
    unknown_edges,
    unknown_models,
    unknown_tensors,
    unmapped_inputs,
    unordered_streams,
    unread_tensors,
    unwritten_tensors,
    wiring_of,
    written_twice,
)
from app.lint.findings import Code, Finding
from app.lint.gateway import batches_of_one, cancel_instances, misfits, special_tokens
from app.lint.sessions import session_faults
from app.pipelines.file import GatewayFile
from app.pipelines.resolve import derived_spec

BACKENDS = (
    *("ensemble", "python", "onnxruntime", "tensorrt", "pytorch", "tensorflow", "openvino", "vllm", "tensorrtllm"),
    *("dali", "fil", "identity", "repeat", "square"),
)
"""Those of NVIDIA's images."""


def unknown_backends(model: RepositoryModel) -> Iterator[Finding]:
    """Checks the backend that a model's folder holds or declares."""
    if model.files is None:
        return
    backend = model.files.backend
    if backend and backend not in BACKENDS:
        text = f"backend '{backend}' is not one of NVIDIA's images, and Triton needs it installed"
        yield Finding(Code.UNKNOWN_BACKEND, text + nearest(backend, BACKENDS), model.folder)


def script_faults(model: RepositoryModel) -> Iterator[Finding]:
    """Checks the scripts of the Python backend in a model's folder."""
    if model.files is None:
        return
    for path in model.files.lacks:
        text = f"{path} does not exist: the Python backend needs this script in each version"
        yield Finding(Code.MISSING_SCRIPT, text, model.folder)
    for mistake in model.files.mistakes:
        yield Finding(Code.SCRIPT_SYNTAX, mistake, model.folder)


LARGEST_BATCH = 65_536
MOST_ELEMENTS = 2**31 - 1
_FREE = -1


def invalid_sizes(models: Models) -> Iterator[Finding]:
    """Checks the dimensions and batches that a configuration declares."""
    for model, config in models.items():
        if config.max_batch_size < 0:
            text = f"max_batch_size is {config.max_batch_size}, and must be 0 or more"
            yield Finding(Code.INVALID_SIZE, text, model)
        for tensor, dims in _tensors_of(config):
            if any(dim < 1 and dim != _FREE for dim in dims):
                text = f"'{tensor}' has the dims {shape_text(dims)}: each must be 1 or more, or -1 for any size"
                yield Finding(Code.INVALID_SIZE, text, model, tensor=tensor)


def excessive_sizes(models: Models) -> Iterator[Finding]:
    for model, config in models.items():
        if config.max_batch_size > LARGEST_BATCH:
            text = f"max_batch_size is {config.max_batch_size}, more than {LARGEST_BATCH}"
            yield Finding(Code.EXCESSIVE_SIZE, text, model)
        for tensor, dims in _tensors_of(config):
            if math.prod(dim for dim in dims if dim > 0) > MOST_ELEMENTS:
                text = f"'{tensor}' has the dims {shape_text(dims)}: more than {MOST_ELEMENTS} elements"
                yield Finding(Code.EXCESSIVE_SIZE, text, model, tensor=tensor)


def _tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((spec.name, spec.dims) for spec in (*config.inputs, *config.outputs))


MAX_FINDINGS = 1000


def check(repository: Sequence[RepositoryModel], file: GatewayFile | None = None) -> list[Finding]:
    """``file`` None: only the models are checked. Returns at most MAX_FINDINGS."""
    return list(islice(_findings(repository, file), MAX_FINDINGS))


def _findings(repository: Sequence[RepositoryModel], file: GatewayFile | None) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    readable = {model.folder: model.config for model in repository if not model.complaint}
    overwritten = {model.folder for model in repository if _overwrites_map(model)}
    ensembles = (config for name, config in readable.items() if config.is_ensemble and name not in overwritten)
    wirings = [wiring_of(config, readable) for config in ensembles]
    yield from _folders(repository)
    yield from invalid_sizes(readable)
    yield from excessive_sizes(readable)
    yield from ensemble_cycles(repository)
    yield from bls_cycles(repository)
    decoupled = decoupled_models(models)
    for wiring in wirings:
        yield from _ensemble(wiring, models, decoupled, repository)
    yield from _parallel_failures(repository, wirings, file)
    yield from _omissions(models, wirings, file)
    pipelines = _pipelines(file, readable)
    yield from session_faults(pipelines, readable)
    yield from unwatched_engines(repository)
    yield from preset_faults(pipelines, readable, decoupled)
    if file is not None:
        yield from _gateway(file, readable, models.keys() - readable.keys())


def _overwrites_map(model: RepositoryModel) -> bool:
    """Whether a step's map lost entries. Other findings in the ensemble would follow from that."""
    files = model.files or ModelFiles("")
    return any(each.code == Code.DUPLICATE_KEY for each in files.refusals)


def _pipelines(file: GatewayFile | None, models: Models) -> list[Declared]:
    """The pipelines over these models. ``file`` None: each model is a pipeline."""
    if file is None:
        return [(None, derived_spec(model)) for model in models]
    return [(name, spec) for name, spec in file.spec.pipelines.items() if spec.model in models]


def _folders(repository: Sequence[RepositoryModel]) -> Iterator[Finding]:
    for model in repository:
        if model.complaint:
            yield Finding(Code.UNREADABLE_CONFIG, model.complaint, model.folder)
        elif model.config.name != model.folder:
            text = f"the folder is '{model.folder}' but config.pbtxt has name: '{model.config.name}'"
            yield Finding(Code.FOLDER_NAME, text, model.folder)
        for refusal in model.files.refusals if model.files is not None else ():
            yield Finding(Code(refusal.code), refusal.text, model.folder, refusal.step)
        if model.versions:
            yield from unknown_backends(model)
            yield from script_faults(model)


def _ensemble(
    wiring: Wiring, models: Models, decoupled: Set[str], repository: Sequence[RepositoryModel]
) -> Iterator[Finding]:
    yield from unknown_models(wiring, models)
    yield from _versions(wiring, repository)
    yield from unknown_tensors(wiring)
    yield from unmapped_inputs(wiring)
    yield from unwritten_tensors(wiring)
    yield from unread_tensors(wiring)
    yield from written_twice(wiring)
    yield from tensor_cycles(wiring)
    yield from mismatches(wiring)
    yield from batch_sizes(wiring)
    yield from decoupled_joins(wiring, decoupled)
    yield from unordered_streams(wiring, decoupled)
    yield from routers_needed(wiring)
    yield from unknown_edges(wiring)


def _versions(wiring: Wiring, repository: Sequence[RepositoryModel]) -> Iterator[Finding]:
    versions = {model.folder: model.versions for model in repository}
    for place in wiring.places:
        wanted, there = place.step.version, versions.get(place.step.model)
        if there and wanted and wanted not in there:
            text = f"{place} needs version {wanted} of a model that loads {', '.join(there)}"
            yield Finding(Code.UNKNOWN_VERSION, text, wiring.name, place.number)


def _parallel_failures(
    repository: Sequence[RepositoryModel], wirings: Sequence[Wiring], file: GatewayFile | None
) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    pipelines = {} if file is None else file.spec.pipelines
    for wiring in wirings:
        reasons = reasons_to_fail(wiring.name, repository, pipelines)
        yield from parallel_failures(wiring, models, reasons)


def _omissions(models: Models, wirings: Sequence[Wiring], file: GatewayFile | None) -> Iterator[Finding]:
    pipelines = file.spec.pipelines.values() if file is not None else ()
    omissible = omissible_outputs(models, wirings, pipelines)
    for wiring in wirings:
        yield from omitted_inputs(wiring, omissible)


def _gateway(file: GatewayFile, models: Models, unreadable: Set[str]) -> Iterator[Finding]:
    """A model whose configuration cannot be read has one finding, not another for each place that names it."""
    yield from misfits(file, models, unreadable)
    yield from cancel_instances(file, models)
    yield from special_tokens(file)
    yield from batches_of_one(file, models)


TEXT = "has other inputs or outputs at {} than on most Tritons, so it is not used there"


def compare(engine: InferenceServer, repository: Iterable[RepositoryModel]) -> Iterator[Finding]:
    """Compares the signatures of models between several Tritons.

    ``repository``: what the engine just said of its models.
    """
    for model in repository:
        for address, reason in engine.absences(model.config.name).items():
            if reason == "other_signature":
                yield Finding(Code.OTHER_SIGNATURE, TEXT.format(address), model.config.name)
