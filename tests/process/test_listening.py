"""Listening sockets: no second process can open a port, and connections get an answer instead of a reset."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from socket import create_connection

import httpx
import psutil
import pytest

from app.process.listening import RESERVED, ListeningPortTaken, connections_within, listening, reserved
from tests.toolkit.processes import WITHOUT_TRITON, GatewayProcess, running_gateway
from tests.toolkit.waiting import eventually


def test_a_port_belongs_to_one_socket_until_its_block_ends() -> None:
    with listening("127.0.0.1", 0, "GATEWAY_PORT") as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5) as client:  # before the server runs
            assert client.getpeername() == first.getsockname()
        taken = pytest.raises(ListeningPortTaken, match=f"GATEWAY_PORT: cannot listen on 127.0.0.1:{port}")
        with taken, listening("127.0.0.1", port, "GATEWAY_PORT"):
            pass
    with listening("127.0.0.1", port, "GATEWAY_PORT") as second:
        assert second.getsockname()[1] == port
    unknown = pytest.raises(ListeningPortTaken, match=r"GATEWAY_PORT: cannot listen on host\.invalid:0")
    with unknown, listening("host.invalid", 0, "GATEWAY_PORT"):
        pass


def test_a_reserved_port_is_for_the_sockets_that_share_it() -> None:
    """It gets no connections itself. The kernel alone would allow other sockets of the same user to join."""
    with reserved("127.0.0.1", 0, "GATEWAY_PORT") as port, ExitStack() as stack:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        open_one = partial(listening, "127.0.0.1", port, "GATEWAY_PORT", shares_port=True)
        listeners = [stack.enter_context(open_one()) for _ in range(2)]
        clients = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(64)]
        for each in listeners:
            each.setblocking(False)
            each.accept()[0].close()  # each socket has received connections
        for client in clients:
            client.close()
        for again in (listening("127.0.0.1", port, "GATEWAY_PORT"), reserved("127.0.0.1", port, "X")):
            with pytest.raises(ListeningPortTaken, match=f"cannot listen on 127.0.0.1:{port}"), again:
                pass


SERVE = """
import resource, sys
from app import cli
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
sys.exit(cli.main(["serve"]))
"""
WARNING = "the limit of open files is"


@contextmanager
def serving(folder: Path, soft: int, hard: int, **settings: str) -> Iterator[GatewayProcess]:
    script = SERVE.format(soft=soft, hard=hard)
    with running_gateway(folder, ready=False, script=script, **WITHOUT_TRITON, **settings) as gateway:
        eventually(lambda: is_live(gateway))
        yield gateway


def is_live(gateway: GatewayProcess) -> bool:
    try:
        return httpx.get(f"{gateway.url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_connections_above_a_low_limit_of_files_get_429(tmp_path: Path) -> None:
    with serving(tmp_path, 200, 200) as gateway, ExitStack() as stack:
        wanted = f"{WARNING} 200, so that a process accepts 100 connections and not 4096"
        eventually(lambda: wanted in gateway.log)  # a thread writes the log
        assert f"raise the limit (ulimit -n) to {4096 + RESERVED}" in gateway.log
        port = int(gateway.url.rpartition(":")[2])
        connections = [stack.enter_context(create_connection(("127.0.0.1", port), 10)) for _ in range(110)]
        refused = [each.recv(12) for each in connections[-5:]]
        assert refused == [b"HTTP/1.1 429"] * 5
        assert gateway.metric("rejected_total", reason="too_many_requests") == 10
        assert gateway.metric("out_of_files_total") == 0


@pytest.mark.parametrize(("workers", "soft"), [("1", 4608), ("2", 2560)])
def test_the_soft_limit_is_raised(tmp_path: Path, workers: str, soft: int) -> None:
    with serving(tmp_path, 256, 8192, workers=workers) as gateway:
        parent = psutil.Process(gateway.process.pid)
        for process in parent.children() or [parent]:  # one worker answers while the other still starts
            eventually(lambda process=process: process.rlimit(resource.RLIMIT_NOFILE) == (soft, 8192))  # type: ignore[misc]
        assert WARNING not in gateway.log


def test_a_process_without_free_descriptors_logs_and_counts_it(tmp_path: Path) -> None:
    with serving(tmp_path, 1024, 8192) as gateway:
        process = psutil.Process(gateway.process.pid)
        before = process.rlimit(resource.RLIMIT_NOFILE)
        process.rlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        eventually(lambda: "no file descriptor is free" in gateway.log)
        process.rlimit(resource.RLIMIT_NOFILE, before)
        eventually(lambda: "file descriptors are free again" in gateway.log)
        assert gateway.log.count("no file descriptor is free") == 1
        assert gateway.metric("out_of_files_total") >= 1


def test_the_limit_of_connections_stays_if_the_files_suffice() -> None:
    assert connections_within(10) == 10
