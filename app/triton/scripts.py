"""Parses the Python scripts of a model without executing them: finds the models they call, and syntax errors."""

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.files.document import read_regular_file

MAX_SCRIPT_BYTES = 1024 * 1024
PYTHON = "{}.{}".format(*sys.version_info)


@dataclass(slots=True)
class Scripts:
    calls: set[str] = field(default_factory=set)
    """The models whose name is a literal in an ``InferenceRequest``; other calls are not found."""
    mistakes: list[str] = field(default_factory=list)
    sends_errors: bool = False

    @classmethod
    def read(cls, paths: Iterable[Path]) -> "Scripts":
        scripts = cls()
        for path in paths:
            try:
                scripts._add(_parsed(path))
            except ValueError as exc:
                scripts.mistakes.append(str(exc))
        return scripts

    def _add(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self.calls.update(_requested_models(node))
                self.sends_errors |= _name_of(node.func) == "TritonError"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "execute":
                self.sends_errors |= any(isinstance(inner, ast.Raise) for inner in ast.walk(node))


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


def _requested_models(call: ast.Call) -> Iterator[str]:
    if _name_of(call.func) == "InferenceRequest":
        for keyword in call.keywords:
            if keyword.arg == "model_name" and isinstance(keyword.value, ast.Constant):
                yield str(keyword.value.value)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
