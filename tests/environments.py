"""Environments of tools whose pins do not fit beside the gateway's, each below .cache, from its own lock."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import Require

ROOT = Path(__file__).parents[1]


def locked_environment(name: str, require: Require) -> Path:
    """The folder with the programs of ``requirements/<name>.txt``."""
    folder, uv = ROOT / ".cache" / name, Path(sys.executable).parent / "uv"
    require(uv.exists(), "there is no uv beside this Python: `make test-full` sets it up")
    environment = os.environ | {"UV_CACHE_DIR": str(ROOT / ".cache" / "uv")}
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True, env=environment)
    sync = [uv, "pip", "sync", "--quiet", "--python", folder / "bin" / "python3", "--require-hashes"]
    subprocess.run([*sync, ROOT / "requirements" / f"{name}.txt"], check=True, env=environment)
    return folder / "bin"
