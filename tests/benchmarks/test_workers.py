"""The gateway of the workers' benchmark answers without Triton."""

from pathlib import Path

from benchmarks.load.orders import Unary
from benchmarks.workers import ASK, gateway


async def test_two_workers_with_an_instant_engine_answer(tmp_path: Path) -> None:
    async with gateway("instant", None, tmp_path, workers="2") as peer:
        report = await peer.load.perform(Unary((ASK,) * 2, seconds=0.1))
    assert report.count
