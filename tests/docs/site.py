"""The documentation site, built once for the tests that read it."""

from functools import cache
from pathlib import Path

from deploy.bootstrap import CACHE
from deploy.documentation import build
from tests.conftest import Require
from tests.environments import locked_environment


def built_site(require: Require) -> Path:
    locked_environment("docs", require)
    return _build_once()


@cache
def _build_once() -> Path:
    folder = CACHE / "docs-site"
    build(folder)
    return folder
