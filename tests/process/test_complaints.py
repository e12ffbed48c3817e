"""Scopes of keys and limits that do not fit the gateway are reported, each once."""

import asyncio
from pathlib import Path

import pytest

from app.admission.keys import FollowedKeys
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.process import gateway
from app.process.gateway import Refresh, exceeded_limits, unknown_scopes
from app.routes import DIALECTS
from tests.toolkit.engine import FakeEngine
from tests.toolkit.keys import entry, write_keys

FILE = """
pipelines:
  p: {model: m, limits: {in_flight: 2, per_key: 3}}
  q: {model: n, limits: {in_flight: 4}}
  write: {model: o}
oip: {models: [tool]}
"""
EACH = "but each of the 4 processes runs at least 1 request: together they run up to 4"
UNKNOWN = ["the API key 'a' allows 'wriet', which this gateway does not serve; did you mean 'write'?"]
EXCEEDED = [
    f"limits.in_flight of the pipeline 'p' is 2, {EACH}",
    f"limits.per_key of the pipeline 'p' is 3, {EACH}",
    f"limits.in_flight of the API key 'a' is 1, {EACH}",
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "gateway.yaml").write_text(FILE)
    catalog = Catalog(FakeEngine(), tmp_path / "gateway.yaml")
    catalog.load_file()
    return catalog


@pytest.fixture
def keys(tmp_path: Path) -> FollowedKeys:
    keys = {"a": (["q", "wriet"], {"in_flight": 1}), "b": (["tool"], {"in_flight": 9}), "c": (None, {"queue": 1})}
    entries = [entry(key, **{"pipelines": names} if names else {}, limits=each) for key, (names, each) in keys.items()]
    return FollowedKeys(write_keys(tmp_path / "keys.yaml", *entries), DIALECTS)


def test_unknown_names_and_limits_below_the_number_of_workers_are_found(catalog: Catalog, keys: FollowedKeys) -> None:
    assert list(unknown_scopes(catalog, keys)) == UNKNOWN
    assert list(exceeded_limits(catalog, keys, 4)) == EXCEEDED


def test_one_process_and_a_gateway_without_pipelines_have_nothing_to_report(
    catalog: Catalog, keys: FollowedKeys
) -> None:
    assert not list(exceeded_limits(catalog, None, 1))
    assert not list(unknown_scopes(Catalog(FakeEngine()), keys))


async def test_each_complaint_is_logged_once(
    catalog: Catalog, keys: FollowedKeys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "FILE_POLL_S", 0.001)
    refresh = Refresh(catalog, Metrics("test"), keys, processes=4, has_checked=True)
    running = asyncio.create_task(refresh.run())
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.wait([running])
    assert [each.getMessage() for each in caplog.records if each.name == gateway.__name__] == [*UNKNOWN, *EXCEEDED]
