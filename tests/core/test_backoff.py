"""The delay of a retry grows with each failure, and a reset removes it."""

import pytest

from app.core.aio import Backoff


def test_the_delay_doubles_up_to_a_minute() -> None:
    backoff = Backoff()
    assert [backoff.fail() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_first_and_the_longest_delay_can_be_chosen() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.fail() == 0.5


def test_a_retry_is_due_initially_and_after_a_reset() -> None:
    backoff = Backoff()
    assert backoff.is_due
    backoff.fail()
    assert not backoff.is_due
    backoff.reset()
    assert backoff.is_due


def test_after_a_time_without_failures_the_delays_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    backoff = Backoff(forgiven_s=10.0)
    assert [backoff.fail(), backoff.fail()] == [1.0, 2.0]
    now[0] += 12.0
    assert backoff.fail() == 4.0
    now[0] += 14.1
    assert backoff.fail() == 1.0
