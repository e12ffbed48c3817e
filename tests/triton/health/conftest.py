import pytest

from tests.toolkit.watches import shorten_intervals


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_intervals(monkeypatch)
