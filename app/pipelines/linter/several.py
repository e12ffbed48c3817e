"""Checks that need several Tritons."""

from collections.abc import Iterable, Iterator

from app.domain.engine import Engine
from app.domain.model import RepositoryModel
from app.pipelines.linter.findings import Code, Finding

TEXT = "has other inputs or outputs at {} than on most Tritons, so it is not used there"


def compare(engine: Engine, repository: Iterable[RepositoryModel]) -> Iterator[Finding]:
    """``repository``: what the engine just said of its models."""
    for model in repository:
        for address, reason in engine.absences(model.config.name).items():
            if reason == "other_signature":
                yield Finding(Code.OTHER_SIGNATURE, TEXT.format(address), model.config.name)
