"""A real supervisor with workers that exit early and workers that hang, without a Triton."""

import os
import signal
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from app.observability.metrics import CPU, numbers_of
from app.process.workers.supervisor import MAX_STARTS
from tests.live.connections import workers_of
from tests.processes import WITHOUT_TRITON, GatewayProcess, running_gateway
from tests.waiting import PATIENCE_S, eventually

SERVE = """
import sys
from app import cli
from app.process.workers import supervisor

supervisor.FIRST_DELAY_S = 0.01
supervisor.SILENCE_S = 1.0
{changed}
sys.exit(cli.main(["serve"]))
"""
CANNOT_START = 'supervisor.COMMAND = (sys.executable, "-c", "raise SystemExit(3)")'


def serving(folder: Path, changed: str = "") -> AbstractContextManager[GatewayProcess]:
    return running_gateway(folder, ready=False, script=SERVE.format(changed=changed), workers="2", **WITHOUT_TRITON)


def states(gateway: GatewayProcess) -> dict[str, str]:
    try:
        return dict(httpx.get(f"{gateway.admin_url}/health/ready").json()["workers"])
    except httpx.TransportError:
        return {}


def deaths(gateway: GatewayProcess) -> list[dict[str, object]]:
    return [line for line in gateway.json_lines() if "ended with status" in str(line["message"])]


def test_workers_that_cannot_start_end_the_process_with_status_1(tmp_path: Path) -> None:
    with serving(tmp_path, CANNOT_START) as gateway:
        assert gateway.process.wait(PATIENCE_S) == 1
        assert "WorkersCannotStart" in gateway.log
        deaths_by_worker = Counter(str(line["message"]).split(" ended")[0] for line in deaths(gateway))
        assert (len(deaths_by_worker), min(deaths_by_worker.values())) == (2, MAX_STARTS)
        assert "worker 1 ended with status 3 and is replaced" in gateway.log


def test_a_missing_program_ends_the_process_with_status_1(tmp_path: Path) -> None:
    with serving(tmp_path, 'supervisor.COMMAND = ("/nowhere",)') as gateway:
        assert gateway.process.wait(PATIENCE_S) == 1
        assert gateway.log.count("worker 1 cannot be started: No such file or directory") >= 5


def test_the_cpu_time_of_a_killed_worker_stays_counted(tmp_path: Path) -> None:
    """Nobody reads the metrics before it is killed."""
    with serving(tmp_path) as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        workers = workers_of(gateway)
        time.sleep(0.5)  # two reports
        killed, total_s = workers[0], sum(numbers_of(pid)[CPU] for pid in (*workers, gateway.process.pid))
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(deaths(gateway)) == 1)
        page = httpx.get(f"{gateway.admin_url}/metrics").text.splitlines()
        (counted_s,) = (float(line.split()[1]) for line in page if line.startswith("process_cpu_seconds_total "))
        assert counted_s >= total_s - 0.1


@pytest.mark.full
def test_a_worker_that_cannot_start_is_retried(tmp_path: Path) -> None:
    """The other worker accepts all connections."""
    only_first = (
        "from app.process.workers.channel import WorkerConfig\n"
        "start = supervisor.WorkerProcess.start\n"
        "async def start_first(order):\n"
        "    usual = supervisor.COMMAND\n"
        f"    if order.number == 2: {CANNOT_START}\n"
        "    try: return await start(order)\n"
        "    finally: supervisor.COMMAND = usual\n"
        "supervisor.WorkerProcess.start = start_first\n"
    )
    with serving(tmp_path, only_first) as gateway:
        eventually(lambda: len(deaths(gateway)) > 6 and states(gateway)["1"] == "not_ready")
        assert states(gateway)["2"] == "starting"
        for _ in range(16):
            assert httpx.get(f"{gateway.url}/health/live").status_code == 200


@pytest.mark.full
def test_a_hung_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        hung, _ = workers_of(gateway)
        os.kill(hung, signal.SIGSTOP)
        eventually(lambda: "does not respond and is killed" in gateway.log)
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        assert hung not in workers_of(gateway)
        (line,) = deaths(gateway)
        assert str(line["message"]).endswith("ended with status -9 and is replaced")
        assert line["pid"] == hung


@pytest.mark.full
def test_a_stop_during_the_start_ends_all_workers(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        eventually(lambda: states(gateway) != {})
        workers = workers_of(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(PATIENCE_S) == 0
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
