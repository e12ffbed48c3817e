"""Separate environments for tools and clients whose pins conflict with the gateway's packages, and shared folders."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from deploy.tool_environment import tool_environment
from tests.conftest import Require

ROOT = Path(__file__).parents[2]
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid4().hex)
"""The same in all processes of a test run."""


def locked_environment(name: str, require: Require) -> Path:
    """Returns the folder with the programs of ``requirements/<name>.txt``."""
    uv = Path(sys.executable).parent / "uv"
    require(uv.exists(), "there is no uv beside this Python: `make test-full` sets it up")
    return tool_environment(name)


def npm_environment(name: str, source: Path, require: Require) -> Path:
    """Returns a folder with the files of ``source`` and the installed packages of its ``package-lock.json``.

    Installs nothing if the folder has these packages already, because another process may use it.
    """
    require(shutil.which("node") and shutil.which("npm"), "there is no node with npm")
    folder = ROOT / ".cache" / name
    with alone_in(folder):
        done = folder / "installed.json"
        wanted = (source / "package-lock.json").read_text()
        for path in source.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        if done.exists() and done.read_text() == wanted:
            return folder
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
        environment = os.environ | {"npm_config_cache": str(folder.parent / "npm")}
        installed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        require(installed.returncode == 0, f"npm installs nothing here: {installed.stderr[-500:]}")
        done.write_text(wanted)
    return folder


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Creates the folder, and keeps the other test processes out of such a block for the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def once_in(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns the folder after ``build`` has filled it, in the first of this run's processes that needs it."""
    built_by = folder.with_suffix(".run")
    with alone_in(folder):
        if not built_by.exists() or built_by.read_text() != RUN:
            build(folder)
            built_by.write_text(RUN)
    return folder


@contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Yields another name of ``folder`` for this process and others of the same user.

    Unix sockets need a short one: their addresses have at most 107 bytes.
    """
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
