"""The gateway as process 1 of a container, where the kernel drops signals that have no handler."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.toolkit.waiting import eventually

END_S = 20.0


@pytest.fixture
def starting(require: Require, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway that imports its modules. The process is `unshare`; its child is process 1 of the namespace."""
    require(os.geteuid() == 0 and shutil.which("unshare"), "a namespace of processes needs root and unshare")
    command = ["unshare", "--pid", "--fork", sys.executable, "-m", "app.cli", "serve", "--triton", "127.0.0.1:1"]
    environment = os.environ | {"GATEWAY_PORT": "0", "GATEWAY_ADMIN_PORT": "0"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    eventually(lambda: bool(child_of(process)))
    eventually(lambda: "numpy" in Path(f"/proc/{child_of(process)}/maps").read_text())
    yield process
    if process.poll() is None:
        os.kill(int(child_of(process)), signal.SIGKILL)
        process.wait(END_S)


def child_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()


def test_sigterm_ends_a_gateway_that_is_starting(starting: subprocess.Popen[bytes]) -> None:
    os.kill(int(child_of(starting)), signal.SIGTERM)
    assert starting.wait(END_S) == 128 + signal.SIGTERM
