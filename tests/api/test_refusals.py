"""Pace delays rejected connections above a rate."""

import pytest

from app.api.failures import LONGEST_DELAY_S, Pace


def test_a_burst_is_not_delayed() -> None:
    pace = Pace(rate=100, burst=10)
    assert [pace.delay_s(50.0) for _ in range(10)] == [0.0] * 10


def test_a_steady_rate_below_the_limit_is_not_delayed() -> None:
    pace = Pace(rate=100, burst=10)
    assert max(pace.delay_s(50.0 + 0.0101 * number) for number in range(1000)) == 0.0


def test_excess_is_spread_over_time() -> None:
    pace = Pace(rate=100, burst=10)
    delays = [pace.delay_s(50.0) for _ in range(60)]
    assert delays[10:] == pytest.approx([0.01 * (number + 1) for number in range(50)])


def test_the_delay_has_a_maximum() -> None:
    pace = Pace(rate=100, burst=10)
    assert max(pace.delay_s(50.0) for _ in range(5000)) == LONGEST_DELAY_S
    assert pace.delay_s(52.0) == 0.0
