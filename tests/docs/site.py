"""Builds the documentation site once for all tests."""

import os
from pathlib import Path

from deploy.bootstrap import CACHE
from deploy.documentation import build
from tests.conftest import Require
from tests.environments import alone_in, locked_environment

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
"""The same in all processes of a test run."""


def built_site(require: Require) -> Path:
    try:
        locked_environment("docs", require)
    except SystemExit as stopped:
        require(None, f"the generator of the site cannot be installed here: {stopped}")
    folder, built_by = CACHE / "docs-site", CACHE / "docs-site.run"
    with alone_in(folder):
        if not built_by.exists() or built_by.read_text() != RUN:
            build(folder)
            built_by.write_text(RUN)
    return folder
