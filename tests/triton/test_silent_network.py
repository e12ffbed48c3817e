"""A network that silently drops the packets of one connection: lost state of a firewall or NAT, a lost node."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Require

PROGRAMS = ("unshare", "ip", "iptables")
CALLS_OF_20_S = 13
"""Calls with deadlines of 2 s, one after the other, in a little more than 20 s."""


@pytest.fixture
def measured(require: Require, pytestconfig: pytest.Config) -> "Measure":
    require(all(map(shutil.which, PROGRAMS)), f"there is no {', '.join(PROGRAMS)}: see `make system-packages`")
    require(os.geteuid() == 0, "only root may create a network namespace")
    return Measure(pytestconfig.rootpath)


class Measure:
    """Runs tests/triton/silent_network.py in a network namespace of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, *runs: tuple[str, float, float]) -> list[dict[str, float]]:
        """Returns the seconds and the failed calls until the first answer, for each of several concurrent runs."""
        program = ["unshare", "--net", sys.executable, "-m", "tests.triton.silent_network"]
        running = [
            subprocess.Popen([*program, *map(str, run)], cwd=self._root, stdout=subprocess.PIPE, text=True)
            for run in runs
        ]
        return [json.loads(process.communicate()[0]) for process in running]


def test_calls_leave_a_silent_connection_and_an_idle_one_is_replaced_before_the_next_call(measured: Measure) -> None:
    busy, idle = measured(("asyncio", 2, 0), ("asyncio", 2, 6))
    assert busy["failed"] <= 3
    assert idle["failed"] == 0


@pytest.mark.full
def test_a_silent_connection_lasts_no_longer_than_with_grpcio(measured: Measure) -> None:
    busy, idle, reference = measured(("asyncio", 20, 0), ("asyncio", 20, 28), ("grpcio", 20, 0))
    assert busy["failed"] <= max(reference["failed"] + 1, CALLS_OF_20_S)
    assert idle["failed"] == 0
