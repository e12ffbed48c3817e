"""Reads the model repository from disk or from a running server.

Parses the Python scripts of a model without executing them: finds the models they call, and syntax errors.
"""

import ast
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from app.config.document import DocumentError, read_document, read_regular_file
from app.core.engine import InferenceServer
from app.core.errors import ModelNotReady
from app.core.model import ModelConfig, RepositoryModel
from app.launcher.launch import ServedRepository
from app.launcher.machine import RepositoryUnservable
from app.triton.config import Repeat, model_config_of, parse_config, repeated_keys
from app.triton.refusals import BACKEND_BY_PLATFORM, Declared, refusals, unusable_names

MAX_SCRIPT_BYTES = 1024 * 1024
PYTHON = "{}.{}".format(*sys.version_info)


@dataclass(slots=True)
class Scripts:
    """What the Python files of a model tell."""

    calls: set[str] = field(default_factory=set)
    """The models whose name is a literal in an ``InferenceRequest``; other calls are not found."""
    mistakes: list[str] = field(default_factory=list)
    sends_errors: bool = False
    models: list[ast.ClassDef] = field(default_factory=list)
    """The classes that Triton runs."""

    @property
    def may_complete(self) -> bool:
        """Whether a script may complete the inputs and outputs: by its own method, or by one that cannot be seen."""
        methods = [{getattr(each, "name", "") for each in model.body} for model in self.models if not model.bases]
        return (
            not methods or len(methods) < len(self.models) or any("auto_complete_config" in names for names in methods)
        )


def read_scripts(paths: Iterable[Path]) -> Scripts:
    scripts = Scripts()
    for path in paths:
        try:
            nodes = list(ast.walk(_parsed(path)))
        except ValueError as exc:
            scripts.mistakes.append(str(exc))
            continue
        for node in nodes:
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                scripts.sends_errors |= name == "TritonError"
                for keyword in node.keywords if name == "InferenceRequest" else ():
                    if keyword.arg == "model_name" and isinstance(keyword.value, ast.Constant):
                        scripts.calls.add(str(keyword.value.value))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "execute":
                scripts.sends_errors |= any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            elif isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel":
                scripts.models.append(node)
    return scripts


def _parsed(path: Path) -> ast.Module:
    """Parses a script. Raises ValueError with the path and the line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's style, such as unknown escapes
            return ast.parse(read_regular_file(path, MAX_SCRIPT_BYTES))
    except OSError as exc:
        raise ValueError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except SyntaxError as exc:
        raise ValueError(f"{path}:{exc.lineno or 1}: {exc.msg}, as Python {PYTHON} reads it") from exc
    except (ValueError, RecursionError, MemoryError) as exc:
        raise ValueError(f"{path}:1: cannot be parsed: {exc}") from exc


CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_WIRES = 2048
"""Limit of an ensemble's tensors, steps and the entries of their maps together, which the checks compare."""
SCRIPT = "model.py"
LLM_API_FILE = "model.yaml"
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

EMBEDDED_BACKENDS = ("python", "ensemble")


class RepositoryUnreadable(Exception):
    """The folder does not exist or contains no models."""


def read_repository(path: Path) -> list[RepositoryModel]:
    """Reads all models. A model that cannot be read is included with its error. Raises RepositoryUnreadable."""
    return [_read_model(folder) for folder in model_folders(path)]


def served_repository(path: Path) -> ServedRepository:
    """Examines a repository for the embedded Triton. Raises RepositoryUnservable if that cannot serve a model."""
    try:
        folders = model_folders(path)
    except RepositoryUnreadable as exc:
        raise RepositoryUnservable(str(exc)) from exc
    is_complete = True
    for folder in folders:
        try:
            config = read_config(folder)
        except ValueError as exc:
            raise RepositoryUnservable(f"Model {folder.name!r}: {exc}.") from exc
        backend = backend_of(config, folder)
        needed = backend or config.platform
        if needed and needed not in EMBEDDED_BACKENDS:
            raise RepositoryUnservable(
                f"Model {folder.name!r} needs the backend {needed!r}, which the embedded Triton does not have (only "
                "python and ensembles). NVIDIA's tritonserver image has it: run that as a sidecar and "
                "name it with `triton-gateway serve --triton HOST:PORT`."
            )
        # Triton 2.51 would wait indefinitely for a missing script, and with a name that it cannot use.
        missing = [f"{script} does not exist" for script in missing_scripts(folder, config)]
        for text in [*missing, *unusable_names(folder, config, backend)]:
            raise RepositoryUnservable(f"Model {folder.name!r}: {text}.")
        is_complete &= bool(config.backend or config.platform) and model_config_of(config).declares_tensors
    return ServedRepository(path.resolve(), tuple(each.name for each in folders), is_complete)


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
            models.append(RepositoryModel(name, config, tuple(found), frozenset(config.bls_calls)))
    return models


def model_folders(path: Path) -> list[Path]:
    """Raises RepositoryUnreadable."""
    if not path.is_dir():
        raise RepositoryUnreadable(f"There is no model repository at {path}.")
    try:
        folders = sorted(each for each in path.iterdir() if each.is_dir())
    except OSError as exc:
        raise RepositoryUnreadable(f"The model repository {path} cannot be read: {exc.strerror}.") from exc
    if not folders:
        raise RepositoryUnreadable(
            f"The model repository {path} contains no models: each model needs a folder of its own."
        )
    return folders


def read_config(folder: Path) -> pb.ModelConfig:
    """Returns a model's configuration, empty if there is no file. Raises ValueError with the path of a broken file."""
    path = folder / CONFIG_FILE
    try:
        config = parse_config(read_regular_file(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path} cannot be read: it is not UTF-8 text") from exc
    except ValueError as exc:
        raise ValueError(f"{path}:{exc}") from exc
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and not path.is_symlink():
            return pb.ModelConfig()
        raise ValueError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    wires = sum(1 + len(step.input_map) + len(step.output_map) for step in config.ensemble_scheduling.step)
    if wires + len(config.input) + len(config.output) > MAX_WIRES:
        raise ValueError(f"{path}:1: more than {MAX_WIRES} tensors, steps and entries of their maps")
    return config


def backend_of(config: pb.ModelConfig, folder: Path) -> str:
    """The backend that Triton takes: by the configuration, or by the model's file. Empty if there is none."""
    if config.HasField("ensemble_scheduling") or config.platform == "ensemble":
        return "ensemble"
    names = [config.default_model_filename]
    if not config.platform and not config.default_model_filename:
        names = [file.name for file in folder.glob("*/*")]
    files = (BACKEND_BY_FILE[name] for name in names if name in BACKEND_BY_FILE)
    named = str(config.backend or BACKEND_BY_PLATFORM.get(config.platform) or next(files, ""))
    return named or ("" if config.platform else folder.name.lstrip(".").partition(".")[2])


def missing_scripts(folder: Path, config: pb.ModelConfig) -> list[Path]:
    """Returns the missing scripts of a Python model: one for each version that Triton loads without a script."""
    if backend_of(config, folder) != "python":
        return []
    versions = _loaded(config, _versions(folder))
    scripts = [folder / version / (config.default_model_filename or SCRIPT) for version in versions]
    # With Python before 3.14, Path.exists raises OSError for a name that is too long.
    return [script for script in scripts if not os.path.exists(script)]  # noqa: PTH110


def _versions(folder: Path) -> tuple[str, ...]:
    """The names of the version folders. Triton ignores numbers that begin with 0."""
    folders = (each.name for each in folder.iterdir() if each.is_dir())
    return tuple(sorted(name for name in folders if name.isdecimal() and name == str(int(name))))


def _loaded(config: pb.ModelConfig, versions: tuple[str, ...]) -> tuple[str, ...]:
    """The versions that the policy loads: by default the newest one."""
    policy = config.version_policy
    if policy.HasField("all"):
        return versions
    if policy.HasField("specific"):
        return tuple(each for each in versions if int(each) in policy.specific.versions)
    newest = sorted(versions, key=int, reverse=True)
    count = policy.latest.num_versions if policy.HasField("latest") else 1
    return tuple(sorted(newest[:count]))


def _read_model(folder: Path) -> RepositoryModel:
    empty = ModelConfig(folder.name, backend="", max_batch_size=0, inputs=(), outputs=())
    versions: tuple[str, ...] = ()
    try:
        versions = _versions(folder)
        message = read_config(folder)
        config = model_config_of(message)
        config = _completed(replace(config, name=config.name or folder.name), folder)
        scripts = read_scripts(sorted(folder.glob("*/*.py")))
        backend, loaded, repeats = backend_of(message, folder), _loaded(message, versions), list[Repeat]()
        completes = scripts.may_complete if backend == "python" else backend not in ("ensemble", "pytorch")
        with suppress(FileNotFoundError):
            repeats = repeated_keys(read_regular_file(folder / CONFIG_FILE, MAX_CONFIG_BYTES).decode("utf-8"))
        declared = Declared(message, folder, backend, versions, loaded, completes, repeats)
        return RepositoryModel(
            folder.name,
            config,
            loaded,
            frozenset(config.bls_calls) | scripts.calls,
            backend=backend,
            refusals=tuple(refusals(declared)),
            lacks=tuple(str(path) for path in missing_scripts(folder, message)),
            mistakes=tuple(scripts.mistakes),
            sends_errors=scripts.sends_errors,
        )
    except OSError as exc:
        return RepositoryModel(folder.name, empty, complaint=f"{folder} cannot be read: {exc.strerror}")
    except ValueError as exc:
        return RepositoryModel(folder.name, empty, versions, complaint=str(exc))


def _completed(config: ModelConfig, folder: Path) -> ModelConfig:
    """Adds ``decoupled`` of a model.yaml, as TensorRT-LLM's LLM API model does when it is loaded.

    Source: TensorRT-LLM's ``triton_backend/all_models/llmapi``.
    """
    path = max(folder.glob(f"*/{LLM_API_FILE}"), default=None)
    try:
        values = None if path is None or config.backend != "python" else read_document(path).values
    except (OSError, DocumentError):
        return config
    given = values.get("triton_config") if isinstance(values, dict) else None
    decoupled = given.get("decoupled") if isinstance(given, dict) else None
    return replace(config, decoupled=decoupled) if isinstance(decoupled, bool) else config
