"""The files of the page, where the gateway finds them, and what ``runs.js`` computes from an explanation in Node."""

import json
import subprocess
from pathlib import Path
from typing import Any

from app.api.openapi import CONSOLE

FOLDERS = [Path(folder) for folder in CONSOLE.all_directories]
"""The console's own folder, and that of the files that all pages share."""
FILES = sorted(path.name for folder in FOLDERS for path in folder.iterdir() if path.is_file())


def path_of(name: str) -> Path:
    (found,) = (folder / name for folder in FOLDERS if (folder / name).is_file())
    return found


def read(name: str) -> str:
    return path_of(name).read_text()


_SCRIPT = f"""
import {{ readFileSync }} from "node:fs";
import {{ explained }} from {json.dumps(str(path_of("runs.js")))};
const [answer, graph] = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(explained(answer, graph)));
"""


def explained(answer: dict[str, Any], graph: dict[str, Any]) -> dict[str, Any]:
    """``answer``: of ``GET /v1/requests/{id}/explain``. ``graph``: as ``GET /v1/pipelines/{pipeline}`` has it."""
    command = ["node", "--input-type=module", "--eval", _SCRIPT]
    done = subprocess.run(command, input=json.dumps([answer, graph]), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
