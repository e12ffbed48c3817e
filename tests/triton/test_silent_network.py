"""A network that silently drops the packets of one connection: lost state of a firewall or NAT, a lost node.

The test starts this module in a network namespace of its own, as a program: its arguments are the
``network_s`` of the client, and the seconds before the first call.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.grpc.client import Client
from app.grpc.connection import KeepAlive
from app.grpc.rpc import RpcError
from app.triton.connect import MAX_MESSAGE_BYTES
from tests.conftest import Require
from tests.triton.test_transports import Script, called, serving

PROGRAMS = ("unshare", "ip", "iptables")
DEADLINE_S = 2.0
LONGEST_S = 90.0
ESTABLISHED = "01"


def client_port(server_port: int) -> int:
    """Returns the port of the only connection to the server. Source: proc(5), /proc/net/tcp."""
    rows = [line.split()[1:4] for path in ("tcp", "tcp6") for line in Path("/proc/net", path).read_text().splitlines()]
    (local,) = {
        local
        for local, remote, state in rows
        if state == ESTABLISHED and remote.endswith(f":{server_port:04X}") and not local.endswith(f":{server_port:04X}")
    }
    return int(local.rpartition(":")[2], 16)


def drop(port: int) -> None:
    for end in ("--sport", "--dport"):
        command = ["iptables", "-w", "-A", "INPUT", "-p", "tcp", end, str(port), "-j", "DROP"]
        subprocess.run(command, check=True)


async def measured_here(network_s: float, idle_s: float) -> dict[str, float]:
    """Returns the seconds and the failed calls until the first answer, behind dropped packets."""
    async with serving(Script()) as url:
        transport = Client(url, KeepAlive(300.0, 20.0, network_s=network_s), MAX_MESSAGE_BYTES)
        await called(transport)
        drop(client_port(int(url.rpartition(":")[2])))
        await asyncio.sleep(idle_s)
        failed, start = 0, time.monotonic()
        while time.monotonic() < start + LONGEST_S:
            try:
                await called(transport, timeout_s=DEADLINE_S)
                break
            except RpcError:
                failed += 1
                await asyncio.sleep(0.02)
        found = {"seconds": time.monotonic() - start, "failed": failed}
        await transport.close()
    return found


Measure = Callable[..., list[dict[str, float]]]


@pytest.fixture
def measured(require: Require, pytestconfig: pytest.Config) -> Measure:
    """Returns the seconds and the failed calls until the first answer, for each of several concurrent runs."""
    require(all(map(shutil.which, PROGRAMS)), f"there is no {', '.join(PROGRAMS)}: see `make system-packages`")
    require(os.geteuid() == 0, "only root may create a network namespace")
    program = ["unshare", "--net", sys.executable, "-m", "tests.triton.test_silent_network"]

    def measure(*runs: tuple[float, float]) -> list[dict[str, float]]:
        running = [
            subprocess.Popen([*program, *map(str, run)], cwd=pytestconfig.rootpath, stdout=subprocess.PIPE, text=True)
            for run in runs
        ]
        return [json.loads(process.communicate()[0]) for process in running]

    return measure


def test_calls_leave_a_silent_connection_and_an_idle_one_is_replaced_before_the_next_call(measured: Measure) -> None:
    busy, idle = measured((2, 0), (2, 6))
    assert busy["failed"] <= 3
    assert idle["failed"] == 0


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    found = asyncio.run(measured_here(*map(float, sys.argv[1:])))
    sys.stdout.write(json.dumps(found))
