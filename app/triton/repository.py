"""Reads the model repository from disk or from a running server."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from app.config.document import ConfigError, read_document
from app.core.engine import InferenceServer
from app.core.errors import ModelNotReady
from app.core.model import ModelConfig, RepositoryModel
from app.launcher.launch import ServedRepository
from app.launcher.machine import RepositoryUnservable
from app.triton.codec import document_of, model_config_of
from app.triton.model_folder import ModelFolder
from app.triton.refusals import refusals, unusable_names

LLM_API_FILE = "model.yaml"
EMBEDDED_BACKENDS = ("python", "ensemble")


def read_repository(path: Path) -> list[RepositoryModel]:
    """Reads all models. A model that cannot be read is included with its error. Raises RepositoryUnservable."""
    return [_read_model(folder) for folder in _folders(path)]


def served_repository(path: Path) -> ServedRepository:
    """Examines a repository for the embedded Triton. Raises RepositoryUnservable if that can serve no model."""
    folders = {each.path.name: each for each in _folders(path) if not _is_leftover(each.path)}
    refused, is_complete = {name: text for name, each in folders.items() if (text := _refusal_of(each))}, True
    configs = {name: each.config for name, each in folders.items() if name not in refused}
    while blocked := {  # Triton would load the refused step of an ensemble
        name: f"its step {step.model_name!r} is not served."
        for name, config in configs.items()
        for step in config.ensemble_scheduling.step
        if step.model_name in refused
    }:
        refused |= blocked
        configs = {name: config for name, config in configs.items() if name not in blocked}
    if not configs:
        raise RepositoryUnservable("\n".join(f"Model {name!r}: {text}" for name, text in refused.items()))
    for config in configs.values():
        is_complete &= bool(config.backend or config.platform) and model_config_of(config).declares_tensors
    return ServedRepository(path.resolve(), tuple(configs), is_complete, refused)


def _is_leftover(folder: Path) -> bool:
    """Whether the folder has nothing but compiled modules, as git leaves it when another branch has no such model."""
    compiled = "__pycache__"
    found = {path.name for path in (*folder.glob("*/*"), *folder.iterdir()) if not path.name.isdecimal()}
    return folder.name == compiled or found == {compiled}


def _refusal_of(folder: ModelFolder) -> str:
    """Why the embedded Triton cannot load the model; empty if nothing is known."""
    try:
        needed = folder.backend or folder.config.platform
    except ValueError as exc:
        return f"{exc}."
    if needed and needed not in EMBEDDED_BACKENDS:
        return (
            f"it needs the backend {needed!r}, which the embedded Triton does not have (only python and ensembles). "
            "NVIDIA's tritonserver image has it: run that as a sidecar and name it with `triton-gateway serve --triton "
            "HOST:PORT`."
        )
    # Triton 2.51 would wait indefinitely for a missing script, and with a name that it cannot use.
    missing = (f"{script} does not exist" for script in folder.missing_scripts)
    return next((f"{text}." for text in [*missing, *unusable_names(folder)]), "")


async def live_repository(engine: InferenceServer) -> list[RepositoryModel]:
    """Returns the ready models of a server. The calls of a script are known only if its configuration declares them."""
    versions: dict[str, list[str]] = {}
    for state in await engine.models():
        if state.ready:
            versions.setdefault(state.name, []).append(state.version)
    models = []
    for name, found in sorted(versions.items()):
        with suppress(ModelNotReady):
            config = await engine.model_config(name)
            calls = frozenset(config.names_in("bls_calls"))
            document = await engine.document("config", name)
            models.append(RepositoryModel(name, config, tuple(found), calls, document=document))
    return models


def _folders(path: Path) -> list[ModelFolder]:
    """Raises RepositoryUnservable."""
    if not path.is_dir():
        raise RepositoryUnservable(f"There is no model repository at {path}.")
    if (path / "config.pbtxt").exists():
        raise RepositoryUnservable(
            f"{path} is the folder of one model: name the folder that has it, {path.resolve().parent}"
        )
    try:
        folders = sorted(each for each in path.iterdir() if each.is_dir())
    except OSError as exc:
        raise RepositoryUnservable(f"The model repository {path} cannot be read: {exc.strerror}.") from exc
    if not folders:
        raise RepositoryUnservable(
            f"The model repository {path} contains no models: each model needs a folder of its own."
        )
    return list(map(ModelFolder, folders))


def _read_model(folder: ModelFolder) -> RepositoryModel:
    name, versions = folder.path.name, tuple[str, ...]()
    empty = ModelConfig(name, backend="", max_batch_size=0, inputs=(), outputs=())
    try:
        versions = folder.versions
        config = model_config_of(folder.config)
        config = _completed(replace(config, name=config.name or name), folder.path)
        return RepositoryModel(
            name,
            config,
            folder.loaded,
            frozenset(config.names_in("bls_calls")) | folder.scripts.calls,
            backend=folder.backend,
            findings=tuple(refusals(folder)),
            sends_errors=folder.scripts.sends_errors,
            document=document_of(folder.config),
        )
    except OSError as exc:
        return RepositoryModel(name, empty, complaint=f"{folder.path} cannot be read: {exc.strerror}")
    except ValueError as exc:
        return RepositoryModel(name, empty, versions, complaint=str(exc))


def _completed(config: ModelConfig, folder: Path) -> ModelConfig:
    """Adds ``decoupled`` of a model.yaml, as TensorRT-LLM's LLM API model does when it is loaded.

    Source: TensorRT-LLM's ``triton_backend/all_models/llmapi``.
    """
    path = max(folder.glob(f"*/{LLM_API_FILE}"), default=None)
    try:
        values = None if path is None or config.backend != "python" else read_document(path)[0]
    except ConfigError:
        return config
    given = values.get("triton_config") if isinstance(values, dict) else None
    decoupled = given.get("decoupled") if isinstance(given, dict) else None
    return replace(config, decoupled=decoupled) if isinstance(decoupled, bool) else config
