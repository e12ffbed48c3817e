"""The processes that keep the processors awake have the lowest priority, and end with the block."""

import os

import psutil

from benchmarks.awake import processors_awake


def test_one_idle_process_runs_on_each_processor() -> None:
    others = set(psutil.Process().children())
    with processors_awake():
        spinning = set(psutil.Process().children()) - others
        assert len(spinning) == len(os.sched_getaffinity(0))
        while any(os.sched_getscheduler(each.pid) != os.SCHED_IDLE for each in spinning):
            pass
    assert not any(each.is_running() for each in spinning)
