"""Creates the models' environment for a gateway whose own Python cannot run models.

The extra `embedded` has uv for this. A checkout has its own setup, `deploy/bootstrap.py`.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from app.triton.embedded import interpreter, managed_python
from app.triton.embedded.errors import ModelEnvironmentUnfit
from app.triton.embedded.machine import Machine, refusals
from app.triton.embedded.wheel import PACKAGES


def is_needed(gateway: Path) -> bool:
    """Whether the environment `gateway` has uv, but its Python cannot run models. False where Triton cannot run."""
    python = interpreter.inspect(gateway / "bin" / "python3")
    return _path_of_uv().exists() and not (python and python.runs_models) and not refusals(Machine.here())


def create(venv: Path) -> None:
    """Creates `venv` with a Python of this machine or one that uv installs. Raises `ModelEnvironmentUnfit`."""
    paths = interpreter.model_candidates(os.environ)
    found = interpreter.choose(paths, interpreter.inspect, lambda each: each.runs_models)
    python = ["--python", str(found.path)] if found else ["--python", managed_python.REQUEST, "--managed-python"]
    try:
        if stderr := _stderr_of_uv("venv", *python, str(venv)):
            raise ModelEnvironmentUnfit(f"{interpreter.refusal(None)}\n{managed_python.reason_of(stderr)}")
        if stderr := _stderr_of_uv("pip", "install", "--no-deps", "--python", str(venv), "pip", *shlex.split(PACKAGES)):
            raise ModelEnvironmentUnfit(f"The models' environment {venv} could not be installed:\n{stderr}")
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise


def _stderr_of_uv(*arguments: str) -> str | None:
    """Runs uv. Returns None after success."""
    command = [str(_path_of_uv()), *arguments, "--quiet"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip() or "uv failed" if done.returncode else None


def _path_of_uv() -> Path:
    return Path(sysconfig.get_path("scripts")) / "uv"
