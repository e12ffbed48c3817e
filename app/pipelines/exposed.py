"""The models that callers may address by their own names, beside the pipelines over them."""

from collections.abc import Iterable

from app.domain.errors import ModelNotReady, UnknownModel
from app.domain.model import ModelConfig
from app.pipelines.lookup import Lookup


class ExposedModels:
    """Every exposed model and its configuration, as Triton last said it."""

    def __init__(self) -> None:
        self._configs: dict[str, ModelConfig | None] = {}

    @property
    def names(self) -> list[str]:
        return list(self._configs)

    @property
    def configs(self) -> list[ModelConfig]:
        """Those that are known."""
        return [config for config in self._configs.values() if config is not None]

    def __contains__(self, model: str) -> bool:
        return model in self._configs

    def config(self, model: str) -> ModelConfig:
        """The same object until the configuration changes. Raises UnknownModel or ModelNotReady."""
        config = self._configs.get(model)
        if config is not None:
            return config
        if model in self._configs:
            raise ModelNotReady("The model is not loaded.")
        raise UnknownModel("Request for unknown model: this gateway serves no model with this name.")

    def expose(self, names: Iterable[str]) -> None:
        """Makes these the exposed models; what is known of the others is forgotten."""
        self._configs = {name: self._configs.get(name) for name in names}

    def follow(self, lookup: Lookup) -> None:
        """A model that is not ready now keeps its last configuration: Triton answers for its state."""
        for name, known in self._configs.items():
            answer = lookup.answers.get((name, ""))
            if isinstance(answer, ModelConfig) and answer != known:
                self._configs[name] = answer
