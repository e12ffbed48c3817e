"""Runs programs that each use one client library, in separate environments."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAMS = Path(__file__).parent / "programs"

Outcomes = dict[str, Any]
RunProgram = Callable[..., Outcomes]


def error_of(outcome: Any) -> tuple[str, int | None]:
    """Returns the class and the status of the error that a client raised."""
    return outcome["error"], outcome["status"]


@pytest.fixture(scope="session")
def run_program() -> RunProgram:
    """``run_program(interpreter, "kserve_calls.py", url)`` runs a program and returns its output as a value."""

    def run(interpreter: Path, program: str, *arguments: str | Path) -> Outcomes:
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(
            [str(word) for word in (interpreter, program, *arguments)],
            cwd=PROGRAMS,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outcomes: Outcomes = json.loads(done.stdout.splitlines()[-1])
        return outcomes

    return run


def as_float32(vectors: list[list[float]]) -> list[list[float]]:
    """Rounds to FP32: the gateway writes the shortest decimals of an FP32 number, Triton those of a double."""
    return np.float32(vectors).tolist()
