"""Checks of each pipeline's ``sample`` and ``examples``: their files can be read, and the pipeline accepts them."""

from collections.abc import Iterator, Mapping

from app.domain.errors import GatewayError
from app.domain.nearest import nearest
from app.files.document import read_regular_file
from app.pipelines.declared import MAX_FILE_BYTES, Values, body_with, paths_in
from app.pipelines.file import GatewayFile
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.pipeline import Pipeline

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
        pipeline.request_of_json(body_with(pipeline, values, files))
    except GatewayError as exc:
        misfits: list[Misfit] = [((each.field,), each.problem) for each in exc.errors]
        yield from misfits or [((), exc.detail)]
    except (TypeError, ValueError) as exc:
        yield (), f"cannot be sent: {exc}"
