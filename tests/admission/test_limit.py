"""The limits adapt to measurements. A simulated Triton uses its own clock."""

import heapq
import random
from collections.abc import Callable

import pytest

from app.admission.admission import Admission
from app.admission.limit import Limit, ThroughputLimit
from app.core.errors import TooManyRequests
from app.core.model import Capacity

Service = Callable[[int], float]
"""The duration of each request in seconds, for a number of running requests."""


def fifo(instances: int, service_s: float) -> Service:
    """Instances that each take one request at a time."""
    return lambda running: service_s * max(running / instances, 1.0)


def batching(instances: int, first_s: float, next_s: float, largest: int) -> Service:
    """Instances with dynamic batching: a batch takes ``first_s``, and ``next_s`` for each further request."""

    def duration(running: int) -> float:
        batch = max(min(running // (2 * instances), largest), 1)
        batch_s = first_s + next_s * (batch - 1)
        return batch_s * max(running / (batch * instances), 1.0)

    return duration


def under_load(limit: ThroughputLimit, service: Service, answers: int = 4000, noise: float = 0.05) -> float:
    """Runs as many requests as the limit allows while others wait. Returns the throughput of the last quarter."""
    dice = random.Random(7)
    now, running, ends = 0.0, 0, list[float]()
    times = []
    while len(times) < answers:
        while running < limit.value:
            running += 1
            heapq.heappush(ends, now + service(limit.value) * dice.uniform(1 - noise, 1 + noise))
        now = max(heapq.heappop(ends), now)
        running -= 1
        times.append(now)
        limit.ended(None, now, None, is_full=True)
    last = times[-answers // 4 :]
    return len(last) / (last[-1] - last[0])


def test_a_model_that_does_not_batch_keeps_a_short_queue() -> None:
    """One instance, 100 ms for each request, and a declared batch size that the model does not use."""
    limit = ThroughputLimit(1, 8)
    rate = under_load(limit, fifo(1, 0.1))
    assert limit.value <= 4
    assert rate == pytest.approx(10.0, rel=0.1)


def test_a_fast_model_gets_a_high_limit() -> None:
    """One request takes 0.2 ms: all 256 connections of a benchmark may run at once."""
    limit = ThroughputLimit(1, 1)
    under_load(limit, fifo(1, 0.0002), 60_000)
    assert limit.value >= 256


BATCHES = batching(1, 0.02, 0.001, 32)


@pytest.mark.parametrize(
    ("declared", "service", "answers", "least"),
    [
        (32, BATCHES, 20_000, 0.85 * 64 / BATCHES(64)),
        (16, lambda running: (running + 12) / 285, 4000, 0.9 * 285 * 64 / (64 + 12)),
        (1, lambda running: 0.5 * max(running / 40, 1.0), 12_000, 0.85 * 80),
    ],
    ids=[
        "batches are filled",
        "every step of a chain is busy: 157 answers per second with 16 requests, 240 with 64, as measured",
        "a model of one declared instance runs 40 requests at a time",
    ],
)
def test_a_limit_that_increases_throughput_is_found(
    declared: int, service: Service, answers: int, least: float
) -> None:
    assert under_load(ThroughputLimit(1, declared), service, answers) >= least


def test_the_limit_recovers_after_a_slow_phase() -> None:
    limit = ThroughputLimit(2, 4)
    before = under_load(limit, fifo(2, 0.01))
    under_load(limit, fifo(2, 3.0), 60)
    assert under_load(limit, fifo(2, 0.01)) >= 0.9 * before


def test_the_limit_is_unchanged_while_no_requests_wait() -> None:
    limit = ThroughputLimit(2, 8)
    for number in range(5000):
        limit.ended(None, number * 0.01, None, is_full=False)
    assert limit.value == 8


def test_a_full_queue_in_triton_lowers_the_limit() -> None:
    limit = ThroughputLimit(2, 64)
    limit.ended(None, 1.0, TooManyRequests("full"), is_full=False)
    assert limit.value < 64
    for _ in range(20):
        limit.ended(None, 1.0, TooManyRequests("full"), is_full=False)
    assert limit.value == 3


def test_the_limits_of_all_workers_add_up_to_the_capacity() -> None:
    parts = [ThroughputLimit(4, 16, processes=4).value for _ in range(4)]
    assert sum(parts) == 16


def test_a_limit_set_in_the_file_does_not_adapt() -> None:
    limit = Admission().of("p", "m", Capacity(instances=2, requests=8), 5).model_queue.limit
    assert type(limit) is Limit
    limit.ended(None, 1.0, TooManyRequests("full"), is_full=False)
    for number in range(1000):
        limit.ended(None, number * 0.001, None, is_full=True)
    assert limit.value == 5
