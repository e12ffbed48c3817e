"""Runs npm programs, and compiles the client of ``samples/`` with the programs of ``client/``."""

import os
import shutil
from pathlib import Path

from tests.conftest import Require
from tests.live.openapi_document import CHECKED_IN, ROOT
from tests.toolkit.environments import npm_environment, once_in
from tests.toolkit.programs import output_of

FILES = Path(__file__).parent / "client"
NO_NETWORK = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "NO_UPDATE_NOTIFIER": "1"}


def call(folder: Path, *command: str) -> str:
    """Runs an npm program and returns its output."""
    environment = os.environ | NO_NETWORK | {"PATH": f"{folder}/node_modules/.bin:{os.environ['PATH']}"}
    return output_of(command, folder, environment=environment)


def built_client(require: Require) -> Path:
    """Returns a folder with ``calls.mjs`` for Node and ``page.js`` for browsers, compiled in strict mode."""
    return once_in(npm_environment("gateway-client", FILES, require), _compile)


def _compile(folder: Path) -> None:
    for path in (CHECKED_IN, ROOT / "samples" / "client.ts", ROOT / "samples" / "useStream.ts"):
        shutil.copy(path, folder)
    call(folder, "openapi-typescript", "openapi.json", "-o", "api.ts")
    call(folder, "tsc", "--project", "tsconfig.json")
    call(folder, "esbuild", "calls.ts", "--bundle", "--platform=node", "--format=esm", "--outfile=calls.mjs")
    call(folder, "esbuild", "page.tsx", "--bundle", "--jsx=automatic", "--outfile=page.js")
