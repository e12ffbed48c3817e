"""Starts gateways as forks of a process that has imported the gateway: the imports take longer than the start.

The tests of the command line, of the documentation and of the workers start it as users do.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["app.cli", "app.process.serving"])
_temporary = os.open(tempfile.gettempdir(), os.O_PATH)
"""Open until the end: multiprocessing has a unix socket there, whose address is short only by this descriptor."""

SERVE = "import sys; from app.cli import main; sys.exit(main(['serve']))"


class ForkedGateway:
    """A running ``triton-gateway serve`` with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(self, environment: Mapping[str, str], folder: Path, log_path: Path, script: str) -> None:
        arguments = dict(environment), folder, log_path, script
        self._process: ForkServerProcess = _forks.Process(target=_run, args=arguments)
        with patch.object(tempfile, "tempdir", f"/proc/{os.getpid()}/fd/{_temporary}"):
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("triton-gateway serve", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(environment: Mapping[str, str], folder: Path, log_path: Path, script: str) -> None:
    """Becomes what a shell would start: a session, an environment, a folder and a log of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    exec(script, {"__name__": "__main__"})
