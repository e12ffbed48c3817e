"""A limit below the number of workers is reported, because together the workers exceed it."""

from pathlib import Path

import pytest

from app.admission.keys import FollowedKeys
from app.main import DIALECTS
from app.pipelines.catalog import Catalog
from app.process.gateway import ShareCheck
from tests.toolkit.engine import FakeEngine
from tests.toolkit.keys import entry, write_keys

FILE = """
pipelines:
  p: {model: m, limits: {in_flight: 2, per_key: 3}}
  q: {model: n, limits: {in_flight: 4}}
  r: {model: o}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "gateway.yaml").write_text(FILE)
    catalog = Catalog(FakeEngine(), tmp_path / "gateway.yaml")
    catalog.load_file()
    return catalog


@pytest.fixture
def keys(tmp_path: Path) -> FollowedKeys:
    limits = [{"in_flight": 1}, {"in_flight": 9}, {"queue": 1}]
    entries = [entry(key, limits=each) for key, each in zip("abc", limits, strict=True)]
    return FollowedKeys(write_keys(tmp_path / "keys.yaml", *entries), DIALECTS)


def test_each_limit_below_the_number_of_workers_is_reported_once(
    catalog: Catalog, keys: FollowedKeys, caplog: pytest.LogCaptureFixture
) -> None:
    check = ShareCheck(catalog, keys, 4)
    for _ in range(3):
        check.run()
    each = "but each of the 4 processes runs at least 1 request: together they run up to 4"
    assert [record.getMessage() for record in caplog.records] == [
        f"limits.in_flight of the pipeline 'p' is 2, {each}",
        f"limits.per_key of the pipeline 'p' is 3, {each}",
        f"limits.in_flight of the API key 'a' is 1, {each}",
    ]


def test_one_process_keeps_every_limit(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    ShareCheck(catalog, None, 1).run()
    assert not caplog.records
