"""A retry comes later with each failure, and at once after a reset."""

from app.pipelines.backoff import Backoff


def test_the_delay_doubles_up_to_a_minute() -> None:
    backoff = Backoff()
    delays = []
    for _ in range(8):
        backoff.fail()
        delays.append(backoff.delay_s)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_it_is_due_at_first_and_after_a_reset_but_not_after_a_failure() -> None:
    backoff = Backoff()
    assert backoff.is_due
    backoff.fail()
    assert not backoff.is_due
    backoff.reset()
    assert backoff.is_due
