"""Installs a Python with uv for the models, where no Python of the machine can run them.

Standard library only, and compatible with Python 3.9, because the setup imports this file before it installs anything.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from app.triton.embedded.interpreter import Interpreter, choose, inspect

REQUEST = ">=3.11,<3.13"
"""The versions that can run both the models and the gateway, in the syntax of uv, which installs the newest."""


class PythonUnavailable(Exception):
    """uv could not install a Python, or must not install one. The message is the reason."""


def paths_in(folder: Path) -> list[Path]:
    """Returns the Pythons that `install` put into `folder`."""
    return sorted(folder.glob("cpython-3.*.*/bin/python3"), reverse=True)


def install(uv: Path, folder: Path, environment: Mapping[str, str]) -> Interpreter:
    """Installs a CPython with a shared libpython in `folder`. Raises `PythonUnavailable`.

    uv's own variables in `environment` select its address (`UV_PYTHON_INSTALL_MIRROR`) or forbid the installation
    (`UV_PYTHON_DOWNLOADS=never`, `UV_OFFLINE`).
    """
    require_permission(environment)
    command = [str(uv), "python", "install", "--no-bin", "--no-progress", "--install-dir", str(folder), REQUEST]
    done = subprocess.run(command, env=dict(environment), stderr=subprocess.PIPE, text=True, check=False)
    found = choose(paths_in(folder), inspect, lambda each: each.runs_models)
    if done.returncode != 0 or found is None:
        raise PythonUnavailable(reason_of(done.stderr))
    return found


def require_permission(environment: Mapping[str, str]) -> None:
    """Raises `PythonUnavailable` if a variable in `environment` forbids uv to install a Python."""
    if environment.get("UV_PYTHON_DOWNLOADS") == "never":
        raise PythonUnavailable("The setup does not install one, because UV_PYTHON_DOWNLOADS=never is set.")
    if environment.get("UV_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise PythonUnavailable("The setup does not install one, because UV_OFFLINE is set.")


def reason_of(stderr: str) -> str:
    """Returns the reason of an installation that failed with these lines of uv."""
    lines = [f"  {line.strip()}" for line in stderr.splitlines() if line.strip()]
    return "\n".join(["The setup could not install one with uv (UV_PYTHON_INSTALL_MIRROR can name a mirror):", *lines])
