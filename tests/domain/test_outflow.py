"""How long it takes until something is free."""

from app.domain.outflow import LONGEST_S, Outflow


def flowing(per_second: float, seconds: int = 30) -> Outflow:
    outflow = Outflow()
    for tenth in range(10 * seconds):
        outflow.left(per_second / 10, tenth / 10)
    return outflow


def test_it_follows_from_what_left_lately() -> None:
    assert flowing(10.0).retry_after_s(50.0, 30.0) in (5, 6)


def test_it_is_at_least_a_second() -> None:
    assert flowing(1e9).retry_after_s(1.0, 30.0) == 1


def test_at_first_it_is_a_second() -> None:
    assert Outflow().retry_after_s(1.0, 1.0) == 1


def test_if_nothing_leaves_it_is_the_longest_time() -> None:
    assert flowing(10.0).retry_after_s(50.0, 300.0) == LONGEST_S
