import threading

import pytest


@pytest.fixture
def workers_of(load):
    return load("tokens_generate", "tokens_workers").Workers


def test_excess_tasks_wait_in_order(workers_of):
    workers, gate, ran = workers_of(1), threading.Event(), []
    workers.submit(gate.wait)
    for number in range(5):
        workers.submit(lambda number=number: ran.append(number))
    assert ran == []
    gate.set()
    workers.close(5.0)
    assert ran == [0, 1, 2, 3, 4]


def test_each_thread_runs_one_task(workers_of):
    workers, together = workers_of(3), threading.Barrier(3, timeout=5)
    for _ in range(3):
        workers.submit(together.wait)
    workers.close(5.0)
    assert not together.broken


def test_close_waits_for_a_limited_time(workers_of):
    workers, gate = workers_of(1), threading.Event()
    workers.submit(gate.wait)
    workers.close(0.05)
    gate.set()
