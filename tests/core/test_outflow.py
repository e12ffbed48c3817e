"""The retry time is estimated from the recent outflow."""

from app.core.aio import LONGEST_S, DrainRate


def flowing(per_second: float, seconds: int = 30) -> DrainRate:
    outflow = DrainRate()
    for tenth in range(10 * seconds):
        outflow.left(per_second / 10, tenth / 10)
    return outflow


def test_the_retry_time_follows_from_the_recent_rate() -> None:
    assert flowing(10.0).retry_after_s(50.0, 30.0) in (5, 6)


def test_the_retry_time_is_at_least_one_second() -> None:
    assert flowing(1e9).retry_after_s(1.0, 30.0) == 1


def test_the_first_retry_time_is_one_second() -> None:
    assert DrainRate().retry_after_s(1.0, 1.0) == 1


def test_without_outflow_the_retry_time_is_the_maximum() -> None:
    assert flowing(10.0).retry_after_s(50.0, 300.0) == LONGEST_S
