"""Environments of tools and clients whose pins do not fit beside the gateway's."""

import sys
from pathlib import Path

from deploy.tool_environment import tool_environment
from tests.conftest import Require

ROOT = Path(__file__).parents[1]


def locked_environment(name: str, require: Require) -> Path:
    """The folder with the programs of ``requirements/<name>.txt``."""
    uv = Path(sys.executable).parent / "uv"
    require(uv.exists(), "there is no uv beside this Python: `make test-full` sets it up")
    return tool_environment(name)
