"""The exit status of the process when a background task fails."""

import subprocess
import sys

SERVE_WITH_A_FAILING_REFRESH = """
import sys
from app import cli
from app.process import gateway

async def failing(*_: object) -> None:
    raise ZeroDivisionError("the cause")

gateway.keep_fresh = failing
sys.exit(cli.main(["serve", "--port", "0", "--admin-port", "0", "--triton", "127.0.0.1:1", "--drain-s", "0"]))
"""


def test_a_failed_background_task_ends_the_process_with_status_1() -> None:
    command = [sys.executable, "-c", SERVE_WITH_A_FAILING_REFRESH]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    (line,) = (line for line in ended.stderr.splitlines() if "ended unexpectedly" in line)
    assert "'catalog refresh'" in line
    assert "ZeroDivisionError: the cause" in line
