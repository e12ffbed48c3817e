"""Builds the documentation site once for all tests."""

from pathlib import Path

from deploy.bootstrap import CACHE
from deploy.documentation import build
from tests.conftest import Require
from tests.toolkit.environments import locked_environment, once_in


def built_site(require: Require) -> Path:
    try:
        locked_environment("docs", require)
    except SystemExit as stopped:
        require(None, f"the generator of the site cannot be installed here: {stopped}")
    return once_in(CACHE / "docs-site", build)
