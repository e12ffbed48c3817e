"""Limits are totals, and each worker gets a share."""

import pytest

from app.core.share import Share
from app.process.workers.parent import SHARED_OUT, check_shares, settings_of_worker
from app.settings import Settings, SettingsError
from app.triton import cancellation
from app.triton.cancellation import PacedCancels


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
