"""Checks for models that run no request outside of a sequence, although pipelines have no sequences."""

from collections.abc import Iterator

from app.domain.sequence import sequence_ids_of
from app.pipelines.file import GatewayFile
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import Models


def needed_sessions(file: GatewayFile | None, models: Models) -> Iterator[Finding]:
    """``file`` None: each model is a pipeline."""
    pipelines = {name: name for name in models}
    if file is not None:
        pipelines = {name: spec.model for name, spec in file.spec.pipelines.items() if spec.model in models}
    for pipeline, model in pipelines.items():
        ids = sequence_ids_of(models[model], models)
        if ids.needed_by:
            by = "" if ids.needed_by == model else f" because it runs '{ids.needed_by}'"
            text = (
                f"'{model}' needs a session{by}, which pipelines do not have yet: call it under /v2 with the "
                f"parameters `sequence_id` ({ids.form}), `sequence_start` and `sequence_end`"
            )
            yield Finding(Code.NEEDS_SESSION, text, model, pipeline=pipeline if file is not None else None)
