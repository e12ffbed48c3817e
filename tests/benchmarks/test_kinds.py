"""The benchmark of the kinds of traffic runs with real servers, and all peers do the same work."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks import kinds
from benchmarks.load.orders import Relay
from benchmarks.peers import measuring
from benchmarks.peers.peer import Peer


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, models_venv: Path) -> None:
    for module, name in ((kinds, "SECONDS"), (kinds, "WARM_UP_S"), (measuring, "WARM_UP_S")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(kinds, "PACED_S", 0.1)
    monkeypatch.setattr(kinds, "DRAIN_S", 120.0)  # on a busy machine the answers come late


async def test_every_kind_of_traffic_has_a_row_and_all_peers_do_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kinds.running_peers(tmp_path) as peers:
        monkeypatch.setattr(kinds, "running_peers", lambda _: these(peers))
        await check_rows()
        await check_events(peers)


@asynccontextmanager
async def these(peers: Mapping[str, Peer]) -> AsyncIterator[Mapping[str, Peer]]:
    yield peers


async def check_rows() -> None:
    large, tiny = await kinds.run(1)
    assert [row[0] for row in large.rows] == [each.title for each in kinds.WORKLOADS]
    assert [row[0] for row in tiny.rows] == list(kinds.PACED)
    for table in (large, tiny):
        assert all(len(row) == len(table.columns) and all(row) for row in table.rows)


async def check_events(peers: Mapping[str, Peer]) -> None:
    """A stream has the same number of events for every peer."""
    for peer in peers.values():
        for ask in ("speech", "speech v2"):
            report = await peer.load.perform(Relay(peer.asks[ask], 0.001))
            assert report.count % kinds.RESPONSES == 0 < report.count
