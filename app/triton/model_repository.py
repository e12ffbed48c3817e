"""A model repository on disk, and the same as a running server has it."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from app.domain.engine import Engine
from app.domain.errors import ModelNotReady
from app.domain.model import ModelConfig, RepositoryModel
from app.triton.config import model_config_of, parse_config

CONFIG_FILE = "config.pbtxt"


class RepositoryUnreadable(Exception):
    """There is no such folder, or it holds no model."""


def read_repository(path: Path) -> list[RepositoryModel]:
    """Raises RepositoryUnreadable; a model that cannot be read is there with its complaint."""
    return [_read_model(folder) for folder in model_folders(path)]


async def live_repository(engine: Engine) -> list[RepositoryModel]:
    """The models that are ready. What a script calls is known only where its configuration declares it."""
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
        raise RepositoryUnreadable(f"The model repository {path} holds no model: each is a folder of its own.")
    return folders


def read_config(folder: Path) -> pb.ModelConfig:
    """A model's configuration, empty where there is no file. Raises ValueError where it cannot be read."""
    path = folder / CONFIG_FILE
    return parse_config(path.read_text(encoding="utf-8")) if path.is_file() else pb.ModelConfig()


def _read_model(folder: Path) -> RepositoryModel:
    versions = tuple(sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name.isdecimal()))
    try:
        config = model_config_of(read_config(folder))
    except ValueError as exc:
        return RepositoryModel(folder.name, _empty_config(folder.name), versions, complaint=str(exc))
    config = replace(config, name=config.name or folder.name)
    return RepositoryModel(folder.name, config, versions, frozenset(config.bls_calls) | _calls_in(folder))


def _empty_config(name: str) -> ModelConfig:
    return ModelConfig(name, backend="", max_batch_size=0, inputs=(), outputs=())


async def _config_if_ready(engine: Engine, name: str) -> ModelConfig | None:
    try:
        return await engine.model_config(name)
    except ModelNotReady:
        return None


def _calls_in(folder: Path) -> frozenset[str]:
    """The models that the folder's scripts name literally in an ``InferenceRequest``; other calls go unseen."""
    return frozenset(name for script in folder.glob("*/*.py") for name in _requested_models(script))


def _requested_models(script: Path) -> Iterator[str]:
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) == "InferenceRequest":
            for keyword in node.keywords:
                if keyword.arg == "model_name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
