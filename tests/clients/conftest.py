"""Runs programs that each use one client library, in separate environments."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import Require
from tests.toolkit.environments import locked_environment, npm_environment
from tests.toolkit.programs import environment_without_proxies, output_of

HERE = Path(__file__).parent

Outcomes = dict[str, Any]


def outcomes_of(require: Require, environment: str, program: str, *arguments: str | Path) -> Outcomes:
    """Runs a program of ``programs/`` with the packages of an environment. Returns what it prints, as a value."""
    python = locked_environment(environment, require) / "python3"
    printed = output_of([python, program, *arguments], HERE / "programs", environment=environment_without_proxies())
    outcomes: Outcomes = json.loads(printed.splitlines()[-1])
    return outcomes


def outcomes_in_node(require: Require, program: str, *arguments: str) -> Outcomes:
    folder = npm_environment("llm-clients", HERE / "npm_llm", require)
    printed = output_of(["node", program, *arguments], folder, environment=environment_without_proxies())
    outcomes: Outcomes = json.loads(printed.splitlines()[-1])
    return outcomes


def error_of(outcome: Any) -> tuple[str, int | None]:
    """Returns the class and the status of the error that a client raised."""
    return outcome["error"], outcome["status"]


def as_float32(vectors: list[list[float]]) -> list[list[float]]:
    """Rounds to FP32: the gateway writes the shortest decimals of an FP32 number, Triton those of a double."""
    return np.float32(vectors).tolist()
