"""The exit status of the process when a background task fails."""

from pathlib import Path

from tests.toolkit.processes import WITHOUT_TRITON, running_gateway
from tests.toolkit.waiting import PATIENCE_S

SERVE_WITH_A_FAILING_REFRESH = """
import sys
from app import cli
from app.process import gateway

async def failing(*_: object) -> None:
    raise ZeroDivisionError("the cause")

gateway.Refresh.run = failing
sys.exit(cli.main(["serve"]))
"""


def test_a_failed_background_task_ends_the_process_with_status_1(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ready=False, script=SERVE_WITH_A_FAILING_REFRESH, **WITHOUT_TRITON) as gateway:
        assert gateway.process.wait(PATIENCE_S) == 1
        (line,) = (line for line in gateway.log.splitlines() if "ended unexpectedly" in line)
    assert "'catalog refresh'" in line
    assert "ZeroDivisionError: the cause" in line
