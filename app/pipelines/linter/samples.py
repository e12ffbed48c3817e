"""Checks of each pipeline's ``sample``: its files can be read, and the pipeline accepts it."""

from collections.abc import Iterator

from app.domain.errors import GatewayError
from app.domain.nearest import nearest
from app.files.document import read_regular_file
from app.pipelines.file import GatewayFile
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.pipeline import Pipeline
from app.pipelines.warm_up import MAX_FILE_BYTES, sample_body

Misfit = tuple[tuple[str, ...], str]
"""The path of the key below ``sample``, and what is wrong with it."""


def sample_misfits(file: GatewayFile, pipeline: Pipeline) -> Iterator[Finding]:
    if pipeline.spec.sample is None:
        return
    misfits = [*_unknown_fields(pipeline), *_unreadable_files(file, pipeline)] or [*_refusals(file, pipeline)]
    for location, text in misfits:
        complaint = file.complaint(("pipelines", pipeline.name, "sample", *location), text)
        yield Finding(Code.SAMPLE, complaint, model=pipeline.spec.model, pipeline=pipeline.name)


def _unknown_fields(pipeline: Pipeline) -> Iterator[Misfit]:
    names = [*(field.name for field in pipeline.inputs), *(field.name for field in pipeline.parameters)]
    for name in pipeline.spec.sample or ():
        if name not in names:
            yield (name,), f"is not a field of the pipeline{nearest(name, names)}"


def _unreadable_files(file: GatewayFile, pipeline: Pipeline) -> Iterator[Misfit]:
    sample = pipeline.spec.sample or {}
    for field in pipeline.inputs:
        name = sample.get(field.name)
        if field.is_file and isinstance(name, str):
            path = file.path.parent / name
            try:
                read_regular_file(path, MAX_FILE_BYTES)
            except OSError as exc:
                yield (field.name,), f"names a file that cannot be read: {path}: {exc.strerror or exc}"


def _refusals(file: GatewayFile, pipeline: Pipeline) -> Iterator[Misfit]:
    try:
        pipeline.request_of_json(sample_body(pipeline, file.path.parent))
    except GatewayError as exc:
        misfits: list[Misfit] = [((each.field,), each.problem) for each in exc.errors]
        yield from misfits or [((), exc.detail)]
    except (OSError, TypeError, ValueError) as exc:
        yield (), f"cannot be sent: {exc}"
