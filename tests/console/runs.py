"""What the console computes from an explanation: ``app/console/static/runs.js`` in Node."""

import json
import subprocess
from typing import Any

from tests.console.files import path_of

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
