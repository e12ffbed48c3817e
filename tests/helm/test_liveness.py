"""The liveness command of the Triton sidecar, run by a real shell against two small servers."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.conftest import Require
from tests.helm.rendering import render, triton_container
from tests.processes import free_ports


@contextmanager
def answering(status: int | None) -> Iterator[int]:
    """Yields the port of a server that answers with ``status``, or a port without a server for None."""
    if status is None:
        (port,) = free_ports(1)
        yield port
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


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
    command = triton_container(render())["livenessProbe"]["exec"]["command"]
    with ExitStack() as stack:
        ports = {":8000/": stack.enter_context(answering(triton)), ":8081/": stack.enter_context(answering(gateway))}
        for port, actual in ports.items():
            assert command[-1].count(port) == 1
            command[-1] = command[-1].replace(port, f":{actual}/")
        assert (subprocess.run(command, check=False, timeout=20).returncode == 0) is is_live
