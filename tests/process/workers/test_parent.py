"""A real parent whose workers exit early or hang, without a Triton; and the share of each worker in the limits."""

import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest

from app.core.share import Share
from app.process.workers.parent import SHARED_OUT, check_shares, settings_of_worker
from app.settings import Settings, SettingsError
from app.triton import cancellation
from app.triton.cancellation import PacedCancels
from tests.toolkit.connections import workers_of
from tests.toolkit.processes import WITHOUT_TRITON, GatewayProcess, running_gateway
from tests.toolkit.waiting import PATIENCE_S, eventually

SERVE = """
import sys
from app import cli
from app.process.workers import parent

parent.FIRST_DELAY_S = 0.01
parent.SILENCE_S = 1.0
{changed}
sys.exit(cli.main(["serve"]))
"""
CANNOT_START = 'parent.COMMAND = (sys.executable, "-c", "raise SystemExit(3)")'


def serving(folder: Path, changed: str = "", **settings: str) -> AbstractContextManager[GatewayProcess]:
    """Not as a fork, which would end without its last lines in the log."""
    program = ("-c", SERVE.format(changed=changed))
    return running_gateway(folder, ready=False, program=program, workers="2", **WITHOUT_TRITON, **settings)


def states(gateway: GatewayProcess) -> dict[str, str]:
    try:
        return dict(httpx.get(f"{gateway.admin_url}/health/ready").json()["workers"])
    except httpx.TransportError:
        return {}


def deaths(gateway: GatewayProcess) -> list[dict[str, object]]:
    return [line for line in gateway.json_lines() if "ended with status" in str(line["message"])]


def test_a_worker_that_cannot_start_ends_the_gateway_with_its_status(tmp_path: Path) -> None:
    with serving(tmp_path, CANNOT_START, explain="true") as gateway:
        assert gateway.process.wait(PATIENCE_S) == 3
        assert "GATEWAY_EXPLAIN has no effect" in gateway.log
        assert "ended with status 3" in gateway.log
        assert "Traceback" not in gateway.log


def test_a_worker_whose_port_is_taken_ends_the_gateway_with_status_2(tmp_path: Path) -> None:
    """A socket that does not share the port, between the check of the parent and the start of the workers."""
    taken = (
        "import socket\n"
        "real = parent.reserved\n"
        "def reserved(*given):\n"
        "    with real(*given) as port: pass\n"
        "    socket.create_server(('127.0.0.1', port)).detach()\n"
        "    return parent.nullcontext(port)\n"
        "from contextlib import nullcontext\n"
        "parent.nullcontext, parent.reserved = nullcontext, reserved\n"
    )
    with serving(tmp_path, taken) as gateway:
        assert gateway.process.wait(PATIENCE_S) == 2
        assert "GATEWAY_PORT: cannot listen on 127.0.0.1" in gateway.log


def test_a_missing_program_ends_the_gateway_with_status_1(tmp_path: Path) -> None:
    with serving(tmp_path, 'parent.COMMAND = ("/nowhere",)') as gateway:
        assert gateway.process.wait(PATIENCE_S) == 1
        assert "worker 1 cannot be started: No such file or directory" in gateway.log


def test_the_cpu_time_of_a_killed_worker_stays_counted_and_its_state_does_not_stay(tmp_path: Path) -> None:
    """Nobody reads the metrics before it is killed. It is not replaced."""
    with serving(tmp_path, "parent.FIRST_DELAY_S = 600.0") as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        killed, _ = workers_of(gateway)
        time.sleep(0.5)  # two heartbeats
        total_s = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in workers_of(gateway))
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(deaths(gateway)) == 1)
        page = httpx.get(f"{gateway.admin_url}/metrics").text.splitlines()
        (counted_s,) = (float(line.split()[1]) for line in page if line.startswith("process_cpu_seconds_total "))
        assert counted_s >= total_s - 0.1
        assert sorted(states(gateway).values()) == ["not_ready", "starting"]


@pytest.mark.full
def test_a_worker_that_does_not_start_again_is_retried(tmp_path: Path) -> None:
    """The other worker accepts all connections."""
    never_again = (
        "clear = parent.Board.clear\n"
        "def cleared(self, number):\n"
        "    clear(self, number)\n"
        f"    {CANNOT_START}\n"
        "parent.Board.clear = cleared\n"
    )
    with serving(tmp_path, never_again) as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        os.kill(workers_of(gateway)[1], signal.SIGKILL)
        eventually(lambda: len(deaths(gateway)) > 6)
        assert sorted(states(gateway).values()) == ["not_ready", "starting"]
        for _ in range(16):
            assert httpx.get(f"{gateway.url}/health/live").status_code == 200


@pytest.mark.full
def test_a_hung_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        hung, _ = workers_of(gateway)
        os.kill(hung, signal.SIGSTOP)
        eventually(lambda: "does not respond and is killed" in gateway.log)
        eventually(lambda: len(deaths(gateway)) == 1)
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


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_the_shares_add_up_to_the_total(workers: int) -> None:
    settings = Settings(workers=workers, max_connections=100, max_bytes_in_flight=268_435_457)
    shares = [settings_of_worker(settings, Share(number, workers)) for number in range(1, workers + 1)]
    for name in SHARED_OUT:
        values = [getattr(share, name) for share in shares]
        assert sum(values) == getattr(settings, name)
        assert max(values) - min(values) <= 1


@pytest.mark.parametrize(("settings", "total"), [({"embedded": True}, 256 * 2**20), ({"shared_memory_bytes": 7}, 7)])
def test_shared_memory_is_divided_among_workers(settings: dict[str, int], total: int) -> None:
    whole = Settings(workers=2, **settings)
    assert sum(settings_of_worker(whole, Share(number, 2)).shared_memory_limit for number in (1, 2)) == total


def test_other_settings_are_unchanged() -> None:
    settings = Settings(workers=2, early_exit_key="x" * 16, cors_origins="https://a.example")
    share = settings_of_worker(settings, Share(1, 2))
    assert {name for name in Settings.model_fields if getattr(share, name) != getattr(settings, name)} == set(
        SHARED_OUT
    )


def test_more_workers_than_connections_are_an_error() -> None:
    with pytest.raises(SettingsError, match="GATEWAY_MAX_CONNECTIONS is 3: each of the 4 workers needs at least 1"):
        check_shares(Settings(workers=4, max_connections=3))


def test_a_share_smaller_than_one_body_is_an_error() -> None:
    settings = {"max_body_bytes": 64 * 1024 * 1024, "max_bytes_in_flight": 256 * 1024 * 1024}
    check_shares(Settings(workers=4, **settings))
    with pytest.raises(SettingsError, match="each of the 5 workers needs at least 67108864, GATEWAY_MAX_BODY_BYTES"):
        check_shares(Settings(workers=5, **settings))


def test_all_workers_together_have_the_rate_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the size of the burst and the rate after the burst."""
    monkeypatch.setattr(cancellation.time, "monotonic", lambda: 1000.0)
    alone, workers = PacedCancels(), [PacedCancels.shared_by(4) for _ in range(4)]
    turns = sorted(worker.turn() for worker in workers for _ in range(100))
    expected = [alone.turn() for _ in range(400)]
    assert sum(turn <= 1000.0 for turn in turns) <= sum(turn <= 1000.0 for turn in expected)
    assert turns[-1] == pytest.approx(expected[-1])
