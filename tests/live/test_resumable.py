"""Resumable streams in one gateway process, which keeps the events in memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.live.conftest import GatewayProcess
from tests.live.resumable import delete, read_all, read_some, reading, start, status
from tests.toolkit.waiting import eventually


def calls(gateway: GatewayProcess) -> float:
    return gateway.metric("triton_calls_total", model="scripted_stream")


def test_resuming_gives_no_gaps_or_duplicates(gateway: GatewayProcess) -> None:
    before = calls(gateway)
    path = start(gateway, outputs=12, interval_s=0.03)
    events = read_some(gateway, path, 3)
    events += read_some(gateway, path, 4, after=3)
    events += read_all(gateway, path, after=7)
    assert [event.id for event in events] == list(range(1, 14))
    assert events[-1].data["outputs"] == 12
    assert read_all(gateway, path) == events
    assert calls(gateway) == before + 1


def test_delete_cancels_the_model_and_removes_the_stream(gateway: GatewayProcess, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    path = start(gateway, outputs=1000, interval_s=0.03, notice=str(notice))
    with reading(gateway, path) as events:
        seen = [next(events)]
        assert delete(gateway, path) == 204
        seen += list(events)
    assert (seen[-1].name, seen[-1].data["code"]) == ("error", "cancelled")
    assert seen[-1].data["detail"] == "The stream was cancelled with DELETE."
    eventually(lambda: notice.exists() and bool(notice.read_text()))
    assert status(gateway, path) == 404
    assert delete(gateway, path) == 404


def test_only_a_stream_without_readers_is_cancelled_and_expires(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Both streams last longer than ``resume_s``."""
    notice = tmp_path / "notice"
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(read_all, gateway, start(gateway, outputs=6, interval_s=0.5))
        started = time.monotonic()
        path = start(gateway, outputs=1000, interval_s=0.05, notice=str(notice))
        eventually(lambda: notice.exists() and bool(notice.read_text()))
        assert float(notice.read_text().split()[0]) - started >= 1.9
        events = read_all(gateway, path)
        assert (events[-1].name, events[-1].data["code"]) == ("error", "cancelled")
        time.sleep(2.2)
        assert status(gateway, path) == 404
        assert read.result()[-1].data["reason"] == "complete"
