"""The liveness command of the Triton sidecar, run by a real shell against two small servers."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.conftest import Require
from tests.helm.rendering import render, triton_container
from tests.toolkit.http_server import answering
from tests.toolkit.processes import free_ports


@contextmanager
def server_of(status: int | None) -> Iterator[int]:
    """Yields the port of a server that answers with ``status``, or a port without a server for None."""
    if status is None:
        yield from free_ports(1)
        return
    with answering(lambda *_: (status, "text/plain", b"")) as port:
        yield port


@pytest.mark.parametrize(
    ("triton", "gateway", "is_live"),
    [
        (200, 200, True),
        (200, 503, False),
        (200, None, True),
        (200, 404, True),
        (400, 200, False),
        (None, 200, False),
    ],
    ids=["both", "stuck", "no gateway", "no such route", "not live", "no triton"],
)
def test_the_probe_fails_only_for_a_dead_or_stuck_triton(
    require: Require, triton: int | None, gateway: int | None, is_live: bool
) -> None:
    require(shutil.which("curl"), "there is no curl")
    assert passes(triton, gateway, os.getpid()) is is_live


@pytest.mark.parametrize(
    ("blocked", "is_live"),
    [({"SIGABRT"}, False), ({"SIGSEGV"}, False), ({"SIGABRT", "SIGSEGV", "SIGTERM"}, True), ({"SIGTERM"}, True)],
    ids=["abort", "segmentation fault", "many signals", "another signal"],
)
def test_the_probe_fails_while_a_crash_handler_runs(require: Require, blocked: set[str], is_live: bool) -> None:
    """The kernel blocks a signal in the thread that handles it."""
    require(shutil.which("curl"), "there is no curl")
    signals = {signal.Signals[name] for name in blocked}
    block = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {set(map(int, signals))}); print(); input()"
    with subprocess.Popen([sys.executable, "-c", block], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert passes(200, 200, process.pid) is is_live
        process.stdin.write(b"\n")


def passes(triton: int | None, gateway: int | None, process: int) -> bool:
    """Runs the command of the probe. It sees one process of this machine."""
    command = triton_container(render())["livenessProbe"]["exec"]["command"]
    with ExitStack() as stack:
        places = {
            ":8000/": f":{stack.enter_context(server_of(triton))}/",
            ":8081/": f":{stack.enter_context(server_of(gateway))}/",
            "/proc/[0-9]*/": f"/proc/{process}/",
        }
        for place, actual in places.items():
            assert command[-1].count(place) == 1
            command[-1] = command[-1].replace(place, actual)
        return subprocess.run(command, check=False, timeout=20).returncode == 0
