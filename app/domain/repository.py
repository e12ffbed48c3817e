"""A model as a repository has it: its configuration, and what the folder or the server around it says."""

from dataclasses import dataclass

from app.domain.model import ModelConfig


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """``config`` is as far as it is known; a model whose configuration cannot be read has an empty one."""

    folder: str
    config: ModelConfig
    versions: tuple[str, ...] = ()
    calls: frozenset[str] = frozenset()
    """The models that its script calls (BLS), as far as they are declared or can be read."""
    complaint: str = ""
    """Why the configuration cannot be read; empty where it can."""
