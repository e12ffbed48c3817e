"""A model as its folder declares it: its configuration, its versions and its scripts.

Scripts are parsed and never executed.
"""

import ast
import os
import re
import sys
import warnings
from functools import cached_property
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from app.core.files import read_regular_file
from app.core.text import nearest

MAX_SCRIPT_BYTES = 1024 * 1024
PYTHON = "{}.{}".format(*sys.version_info)
CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_WIRES = 2048
"""Limit of an ensemble's tensors, steps and the entries of their maps together, which the checks compare."""
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
BACKEND_BY_PLATFORM = {
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "torch_aoti": "torch_aoti",
    "ensemble": "ensemble",
}

_UNKNOWN_NAME = re.compile(r'"inference\.([A-Za-z.]+)" has no (?:field|value) named "?([A-Za-z0-9_]+)')
_TYPE_BY_OTHER_NAME = {
    "BYTES": "TYPE_STRING",
    "STR": "TYPE_STRING",
    "TEXT": "TYPE_STRING",
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "FLOAT32": "TYPE_FP32",
    "FLOAT64": "TYPE_FP64",
    "DOUBLE": "TYPE_FP64",
    "HALF": "TYPE_FP16",
    "BOOLEAN": "TYPE_BOOL",
    "INT": "TYPE_INT32",
    "LONG": "TYPE_INT64",
}
"""Datatype names of the Open Inference Protocol, numpy and torch -> Triton's name."""


def parse_config(text: str) -> pb.ModelConfig:
    """Parses the text of a ``config.pbtxt``. Raises ValueError with the line of the mistake and the nearest name."""
    try:
        return text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as exc:
        text = str(exc).removesuffix(".")
        if found := _UNKNOWN_NAME.search(text):
            kind, name = found.groups()  # a message or an enum, with the outer messages
            pool = pb.DESCRIPTOR.pool
            try:
                names = list(pool.FindMessageTypeByName(f"inference.{kind}").fields_by_name)
            except KeyError:
                names = list(pool.FindEnumTypeByName(f"inference.{kind}").values_by_name)
            known = _TYPE_BY_OTHER_NAME.get(name.removeprefix("TYPE_")) if kind == "DataType" else None
            text += f"; did you mean '{known}'?" if known else nearest(name, names)
        raise ValueError(text) from exc


class ModelFolder:
    """Everything is read on first use, which raises OSError, or ValueError with the place of a mistake."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        """The text of the configuration, after it was read."""

    @cached_property
    def config(self) -> pb.ModelConfig:
        """Empty if there is no file."""
        path = self.path / CONFIG_FILE
        try:
            self.text = read_regular_file(path, MAX_CONFIG_BYTES).decode("utf-8")
            config = parse_config(self.text)
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

    @cached_property
    def backend(self) -> str:
        """The backend that Triton uses: by the configuration, or by the model's file. Empty if neither names one."""
        config = self.config
        if config.HasField("ensemble_scheduling") or config.platform == "ensemble":
            return "ensemble"
        names = [config.default_model_filename]
        if not config.platform and not config.default_model_filename:
            names = [file.name for file in self.path.glob("*/*")]
        files = (BACKEND_BY_FILE[name] for name in names if name in BACKEND_BY_FILE)
        named = str(config.backend or BACKEND_BY_PLATFORM.get(config.platform) or next(files, ""))
        return named or ("" if config.platform else self.path.name.lstrip(".").partition(".")[2])

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """The names of the version folders. Triton ignores numbers that begin with 0."""
        folders = (each.name for each in self.path.iterdir() if each.is_dir())
        return tuple(sorted(name for name in folders if name.isdecimal() and name == str(int(name))))

    @cached_property
    def loaded(self) -> tuple[str, ...]:
        """The versions that the policy loads: by default the newest one."""
        policy, versions = self.config.version_policy, self.versions
        if policy.HasField("all"):
            return versions
        if policy.HasField("specific"):
            return tuple(each for each in versions if int(each) in policy.specific.versions)
        newest = sorted(versions, key=int, reverse=True)
        count = policy.latest.num_versions if policy.HasField("latest") else 1
        return tuple(sorted(newest[:count]))

    @property
    def missing_scripts(self) -> list[Path]:
        """For a Python model: one path for each version that Triton loads without a script."""
        if self.backend != "python":
            return []
        scripts = [self.path / version / (self.config.default_model_filename or SCRIPT) for version in self.loaded]
        # With Python before 3.14, Path.exists raises OSError for a name that is too long.
        return [script for script in scripts if not os.path.exists(script)]  # noqa: PTH110

    @cached_property
    def scripts(self) -> "Scripts":
        return Scripts(self.path)

    @property
    def completes(self) -> bool:
        """Whether the backend or a script may complete the inputs and outputs.

        A script may by its own method, or by one that cannot be seen.
        """
        if self.backend != "python":
            return self.backend not in {"ensemble", "pytorch"}
        models = self.scripts.models
        methods = [{getattr(each, "name", "") for each in model.body} for model in models if not model.bases]
        return not methods or len(methods) < len(models) or any("auto_complete_config" in names for names in methods)


class Scripts:
    """What the Python files of a model tell."""

    def __init__(self, folder: Path) -> None:
        self.calls = set[str]()
        """The models whose name is a literal in an ``InferenceRequest``; other calls are not found."""
        self.mistakes: list[str] = []
        """Path, line and reason of each file that cannot be read or parsed."""
        self.sends_errors = False
        self.models: list[ast.ClassDef] = []
        """The classes that Triton runs."""
        for path in sorted(folder.glob("*/*.py")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the script's style, such as unknown escapes
                    for node in list(ast.walk(ast.parse(read_regular_file(path, MAX_SCRIPT_BYTES)))):
                        self._read(node)
            except OSError as exc:
                self.mistakes.append(f"{path} cannot be read: {exc.strerror or exc}")
            except SyntaxError as exc:
                self.mistakes.append(f"{path}:{exc.lineno or 1}: {exc.msg}, as Python {PYTHON} reads it")
            except (ValueError, RecursionError, MemoryError) as exc:
                self.mistakes.append(f"{path}:1: cannot be parsed: {exc}")

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            self.sends_errors |= name == "TritonError"
            for keyword in node.keywords if name == "InferenceRequest" else ():
                if keyword.arg == "model_name" and isinstance(keyword.value, ast.Constant):
                    self.calls.add(str(keyword.value.value))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "execute":
            self.sends_errors |= any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        elif isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel":
            self.models.append(node)
