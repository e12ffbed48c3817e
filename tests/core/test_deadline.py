import time

import pytest

from app.core.inference import FLOOR_S, Deadline


@pytest.mark.parametrize("seconds", [0.0, -5.0, 1e-9, FLOOR_S / 2])
def test_a_deadline_has_a_minimum_that_triton_can_handle(seconds: float) -> None:
    deadline = Deadline.after(seconds)
    assert not deadline.has_passed
    assert 0 < deadline.remaining_s() <= FLOOR_S


def test_a_deadline_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline.after(10)
    now = 1004.0
    assert deadline.remaining_s() == pytest.approx(6)
    now = 1010.0
    assert deadline.has_passed
    now = 1011.0
    assert deadline.remaining_s() == 0.0
