"""Resumable streams in one gateway process, which keeps the events in memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.live.resumable import read_all, start, status
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually


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
