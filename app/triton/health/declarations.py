"""What the pipelines of ``gateway.yaml`` declare about the models that they use."""

from collections.abc import Iterable
from typing import Protocol


class Declarations(Protocol):
    """``app/process/tritons.py`` reads them from the catalog, which may change at any time."""

    def first_output_s(self, model: str) -> float:
        """The longest declared time until the first output of a pipeline that uses the model; 0 if none declares it."""

    def engine_errors(self, model: str) -> Iterable[str]:
        """Expressions for messages of the called model that mean that its engine has died."""


class NoDeclarations(Declarations):
    def first_output_s(self, model: str) -> float:
        return 0.0

    def engine_errors(self, model: str) -> Iterable[str]:
        return ()
