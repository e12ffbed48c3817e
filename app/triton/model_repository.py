"""Reads the model repository from disk or from a running server."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from app.domain.engine import Engine
from app.domain.errors import ModelNotReady
from app.domain.model import ModelConfig, ModelFiles, RepositoryModel
from app.triton.config import model_config_of, parse_config
from app.triton.scripts import Scripts

CONFIG_FILE = "config.pbtxt"
SCRIPT = "model.py"
BACKEND_BY_FILE = {
    SCRIPT: "python",
    "model.onnx": "onnxruntime",
    "model.plan": "tensorrt",
    "model.pt": "pytorch",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.xml": "openvino",
    "model.json": "vllm",
}
"""Without a backend in the configuration, Triton chooses the backend by the file in the version folder."""


class RepositoryUnreadable(Exception):
    """The folder does not exist or contains no models."""


def read_repository(path: Path) -> list[RepositoryModel]:
    """Reads all models. A model that cannot be read is included with its error. Raises RepositoryUnreadable."""
    return [_read_model(folder) for folder in model_folders(path)]


async def live_repository(engine: Engine) -> list[RepositoryModel]:
    """Returns the ready models of a server. The calls of a script are known only if its configuration declares them."""
    versions: dict[str, list[str]] = {}
    for state in await engine.models():
        if state.ready:
            versions.setdefault(state.name, []).append(state.version)
    return [
        RepositoryModel(name, config, tuple(found), frozenset(config.bls_calls))
        for name, found in sorted(versions.items())
        if (config := await _config_if_ready(engine, name)) is not None
    ]


def model_folders(path: Path) -> list[Path]:
    """Raises RepositoryUnreadable."""
    if not path.is_dir():
        raise RepositoryUnreadable(f"There is no model repository at {path}.")
    folders = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith((".", "__")))
    if not folders:
        raise RepositoryUnreadable(
            f"The model repository {path} contains no models: each model needs a folder of its own."
        )
    return folders


def read_config(folder: Path) -> pb.ModelConfig:
    """Returns a model's configuration, empty if there is no file. Raises ValueError with the path of a broken file."""
    path = folder / CONFIG_FILE
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path} cannot be read: it is not UTF-8 text") from exc
    except ValueError as exc:
        raise ValueError(f"{path}:{exc}") from exc
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and not path.is_symlink():
            return pb.ModelConfig()
        raise ValueError(f"{path} cannot be read: {exc.strerror}") from exc


def backend_named(config: pb.ModelConfig) -> str:
    return str(config.backend or config.platform)


def backend_by_file(files: Iterable[Path]) -> str | None:
    return next((BACKEND_BY_FILE[file.name] for file in files if file.name in BACKEND_BY_FILE), None)


def missing_scripts(folder: Path, config: pb.ModelConfig) -> list[Path]:
    """Returns the missing scripts of a Python model: one for each version without a script."""
    if backend_named(config) != "python":
        return []
    scripts = [folder / version / (config.default_model_filename or SCRIPT) for version in _versions(folder)]
    return [script for script in scripts if not script.exists()]


def _versions(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name.isdecimal()))


def _read_model(folder: Path) -> RepositoryModel:
    versions = _versions(folder)
    try:
        message = read_config(folder)
        config = model_config_of(message)
    except ValueError as exc:
        return RepositoryModel(folder.name, _empty_config(folder.name), versions, complaint=str(exc))
    config = replace(config, name=config.name or folder.name)
    scripts = Scripts.read(sorted(folder.glob("*/*.py")))
    calls = frozenset(config.bls_calls) | scripts.calls
    return RepositoryModel(folder.name, config, versions, calls, files=_files_of(folder, message, scripts))


def _files_of(folder: Path, message: pb.ModelConfig, scripts: Scripts) -> ModelFiles:
    backend = "ensemble" if message.HasField("ensemble_scheduling") else backend_named(message)
    return ModelFiles(
        backend or backend_by_file(folder.glob("*/*")) or "",
        tuple(str(path) for path in missing_scripts(folder, message)),
        tuple(scripts.mistakes),
        scripts.sends_errors,
    )


def _empty_config(name: str) -> ModelConfig:
    return ModelConfig(name, backend="", max_batch_size=0, inputs=(), outputs=())


async def _config_if_ready(engine: Engine, name: str) -> ModelConfig | None:
    try:
        return await engine.model_config(name)
    except ModelNotReady:
        return None
