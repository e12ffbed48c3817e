"""Every check over a repository's models and gateway.yaml."""

from collections.abc import Iterator, Sequence, Set
from itertools import islice

from app.domain.model import RepositoryModel
from app.pipelines.file import GatewayFile
from app.pipelines.linter import cycles, edges, files, gateway, names, omissions, parallel, sessions, sizes
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import ENSEMBLE, Models, Wiring, decoupled_models, wiring_of

MAX_FINDINGS = 1000


def check(repository: Sequence[RepositoryModel], file: GatewayFile | None = None) -> list[Finding]:
    """``file`` None: only the models are checked. Returns at most MAX_FINDINGS."""
    return list(islice(_findings(repository, file), MAX_FINDINGS))


def _findings(repository: Sequence[RepositoryModel], file: GatewayFile | None) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    readable = {model.folder: model.config for model in repository if not model.complaint}
    wirings = [wiring_of(config, readable) for config in readable.values() if config.backend == ENSEMBLE]
    yield from _folders(repository)
    yield from sizes.invalid_sizes(readable)
    yield from sizes.excessive_sizes(readable)
    yield from cycles.ensemble_cycles(repository)
    yield from cycles.bls_cycles(repository)
    decoupled = decoupled_models(models)
    for wiring in wirings:
        yield from _ensemble(wiring, models, decoupled, repository)
    yield from _parallel_failures(repository, wirings, file)
    yield from _omissions(models, wirings, file)
    yield from sessions.needed_sessions(file, readable)
    if file is not None:
        yield from _gateway(file, readable)


def _folders(repository: Sequence[RepositoryModel]) -> Iterator[Finding]:
    for model in repository:
        if model.complaint:
            yield Finding(Code.UNREADABLE_CONFIG, model.complaint, model.folder)
        elif model.config.name != model.folder:
            text = f"the folder is '{model.folder}' but config.pbtxt has name: '{model.config.name}'"
            yield Finding(Code.FOLDER_NAME, text, model.folder)
        if not model.versions:
            text = "the model has no version folder: add a folder such as 1"
            yield Finding(Code.UNKNOWN_VERSION, text, model.folder)
            continue
        yield from files.unknown_backends(model)
        yield from files.scripts(model)


def _ensemble(
    wiring: Wiring, models: Models, decoupled: Set[str], repository: Sequence[RepositoryModel]
) -> Iterator[Finding]:
    yield from names.unknown_models(wiring, models)
    yield from _versions(wiring, repository)
    yield from names.unknown_tensors(wiring)
    yield from names.unmapped_inputs(wiring)
    yield from names.unwritten_tensors(wiring)
    yield from names.unread_tensors(wiring)
    yield from names.written_twice(wiring)
    yield from cycles.tensor_cycles(wiring)
    yield from edges.mismatches(wiring)
    yield from edges.batch_sizes(wiring)
    yield from edges.decoupled_joins(wiring, decoupled)
    yield from edges.unordered_streams(wiring, decoupled)
    yield from edges.routers_needed(wiring)
    yield from names.unknown_edges(wiring)


def _versions(wiring: Wiring, repository: Sequence[RepositoryModel]) -> Iterator[Finding]:
    versions = {model.folder: model.versions for model in repository}
    for place in wiring.places:
        wanted, there = place.step.version, versions.get(place.step.model)
        if there and wanted and wanted not in there:
            text = f"{place} needs version {wanted} of a model that has {', '.join(there)}"
            yield Finding(Code.UNKNOWN_VERSION, text, wiring.name, place.number)


def _parallel_failures(
    repository: Sequence[RepositoryModel], wirings: Sequence[Wiring], file: GatewayFile | None
) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    pipelines = {} if file is None else file.spec.pipelines
    for wiring in wirings:
        reasons = parallel.reasons_to_fail(wiring.name, repository, pipelines)
        yield from parallel.parallel_failures(wiring, models, reasons)


def _omissions(models: Models, wirings: Sequence[Wiring], file: GatewayFile | None) -> Iterator[Finding]:
    pipelines = file.spec.pipelines.values() if file is not None else ()
    omissible = omissions.omissible_outputs(models, wirings, pipelines)
    for wiring in wirings:
        yield from omissions.omitted_inputs(wiring, omissible)


def _gateway(file: GatewayFile, models: Models) -> Iterator[Finding]:
    yield from gateway.misfits(file, models)
    yield from gateway.cancel_instances(file, models)
