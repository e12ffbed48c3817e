"""Runs programs that each use one client library, in separate environments."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import Require
from tests.toolkit.environments import locked_environment, npm_environment

HERE = Path(__file__).parent

Outcomes = dict[str, Any]


def outcomes_of(require: Require, environment: str, program: str, *arguments: str | Path) -> Outcomes:
    """Runs a program of ``programs/`` with the packages of an environment. Returns what it prints, as a value."""
    python = locked_environment(environment, require) / "python3"
    return _printed([python, program, *arguments], HERE / "programs")


def outcomes_in_node(require: Require, program: str, *arguments: str) -> Outcomes:
    folder = npm_environment("llm-clients", HERE / "npm_llm", require)
    return _printed(["node", program, *arguments], folder)


def _printed(command: Sequence[str | Path], folder: Path) -> Outcomes:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes: Outcomes = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def error_of(outcome: Any) -> tuple[str, int | None]:
    """Returns the class and the status of the error that a client raised."""
    return outcome["error"], outcome["status"]


def as_float32(vectors: list[list[float]]) -> list[list[float]]:
    """Rounds to FP32: the gateway writes the shortest decimals of an FP32 number, Triton those of a double."""
    return np.float32(vectors).tolist()
