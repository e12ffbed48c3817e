"""Determines what a model repository on disk requires of the server."""

from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from app.triton.config import model_config_of
from app.triton.embedded.errors import RepositoryUnservable
from app.triton.model_repository import (
    RepositoryUnreadable,
    backend_by_file,
    backend_named,
    missing_scripts,
    model_folders,
    read_config,
)

ENSEMBLE = "ensemble"
BACKENDS = ("python", ENSEMBLE)


@dataclass(frozen=True)
class ServedRepository:
    """The models of a repository, and whether Triton may skip the slow auto-completion of their configurations."""

    path: Path
    models: tuple[str, ...]
    is_complete: bool

    @classmethod
    def read(cls, path: Path) -> "ServedRepository":
        """Reads the configurations under `path`. Raises `RepositoryUnservable` if the wheel cannot serve a model."""
        folders = _model_folders(path)
        configs = {folder: _config_of(folder) for folder in folders}
        for folder, config in configs.items():
            _require_backend(folder, config)
            _require_script(folder, config)
        return cls(path.resolve(), tuple(each.name for each in folders), all(map(_is_complete, configs.values())))


def _is_complete(config: pb.ModelConfig) -> bool:
    """Whether the configuration is complete, so that it needs no auto-completion."""
    return bool(backend_named(config)) and model_config_of(config).declares_tensors


def _model_folders(path: Path) -> list[Path]:
    try:
        return model_folders(path)
    except RepositoryUnreadable as exc:
        raise RepositoryUnservable(str(exc)) from exc


def _config_of(folder: Path) -> pb.ModelConfig:
    try:
        return read_config(folder)
    except ValueError as exc:
        raise RepositoryUnservable(f"Model {folder.name!r}: {exc}.") from exc


def _require_script(folder: Path, config: pb.ModelConfig) -> None:
    """Raises RepositoryUnservable if a script is missing, because Triton 2.51 would wait for it indefinitely."""
    if missing := missing_scripts(folder, config):
        raise RepositoryUnservable(f"Model {folder.name!r}: {missing[0]} does not exist.")


def _require_backend(folder: Path, config: pb.ModelConfig) -> None:
    backend = backend_named(config) or backend_by_file(folder.glob("*/*"))
    if backend is not None and backend not in BACKENDS:
        raise RepositoryUnservable(
            f"Model {folder.name!r} needs the backend {backend!r}, which the embedded Triton does not have (only "
            "python and ensembles). NVIDIA's tritonserver image has it: run that as a sidecar and "
            "name it with `triton-gateway serve --triton HOST:PORT`."
        )
