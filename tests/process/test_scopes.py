"""Unknown names in the scope of a key are reported with the nearest name."""

from pathlib import Path

import pytest

from app.admission.keys import FollowedKeys
from app.main import DIALECTS
from app.pipelines.catalog import Catalog
from app.process.gateway import ScopeCheck
from tests.toolkit.engine import FakeEngine
from tests.toolkit.keys import entry, write_keys


def keys_of(folder: Path) -> FollowedKeys:
    entries = entry("a", pipelines=["ocr", "wriet"]), entry("b", pipelines=["tool"]), entry("c")
    return FollowedKeys(write_keys(folder / "keys.yaml", *entries), DIALECTS)


def test_each_unknown_name_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gateway.yaml").write_text("pipelines: {ocr: {model: m}, write: {model: n}}\noip: {models: [tool]}\n")
    catalog = Catalog(FakeEngine(), tmp_path / "gateway.yaml")
    catalog.load_file()
    check = ScopeCheck(keys_of(tmp_path), catalog)
    for _ in range(3):
        check.run()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the API key 'a' allows 'wriet', which this gateway does not serve; did you mean 'write'?"]


def test_without_a_file_of_pipelines_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ScopeCheck(keys_of(tmp_path), Catalog(FakeEngine())).run()
    assert not caplog.records
