"""Refused requests and cancellations above a rate are delayed."""

import pytest

from app.core.aio import LeakyBucket

LONGEST_DELAY_S = 1.0


class Delays:
    """How long a bucket delays an event at ``now``, in seconds."""

    def __init__(self) -> None:
        self._bucket = LeakyBucket(per_s=100, burst=10, longest_s=LONGEST_DELAY_S)

    def delay_s(self, now: float) -> float:
        return max(self._bucket.turn(now) - now, 0.0)


def test_a_burst_is_not_delayed() -> None:
    bucket = Delays()
    assert [bucket.delay_s(50.0) for _ in range(10)] == [0.0] * 10


def test_a_steady_rate_below_the_limit_is_not_delayed() -> None:
    bucket = Delays()
    assert max(bucket.delay_s(50.0 + 0.0101 * number) for number in range(1000)) == 0.0


def test_excess_is_spread_over_time() -> None:
    bucket = Delays()
    delays = [bucket.delay_s(50.0) for _ in range(60)]
    assert delays[10:] == pytest.approx([0.01 * (number + 1) for number in range(50)])


def test_the_delay_has_a_maximum() -> None:
    bucket = Delays()
    assert max(bucket.delay_s(50.0) for _ in range(5000)) == LONGEST_DELAY_S
    assert bucket.delay_s(52.0) == 0.0
