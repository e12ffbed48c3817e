"""The start of the process: its messages on the terminal, its signals, its exit status, and its listening sockets.

Background tasks, and the signals that end them.
"""

import asyncio
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from socket import create_connection
from typing import Any

import httpx
import psutil
import pytest

from app.process.serving import announce, hard_to_try
from app.process.supervision import RESERVED, ShutdownRequested, Supervisor, connections_within, listening, reserved
from app.triton.connect import HTTP_PORT, wrong_address
from tests.conftest import Require
from tests.toolkit.models import ensemble, model, pipeline
from tests.toolkit.processes import WITHOUT_TRITON, GatewayProcess, running_gateway
from tests.toolkit.triton import FakeTriton, serving
from tests.toolkit.waiting import PATIENCE_S, eventually


@pytest.mark.parametrize(
    ("is_up", "message"),
    [(False, "Waiting for Triton at 127.0.0.1:1."), (True, "Waiting for shown (model not ready).")],
)
def test_the_message_names_what_is_not_ready(tmp_path: Path, is_up: bool, message: str) -> None:
    (tmp_path / "gateway.yaml").write_text("pipelines: {shown: {model: m}, other: {model: m, readiness: optional}}")

    async def run() -> None:
        async with AsyncExitStack() as stack:
            address = (await stack.enter_async_context(serving(FakeTriton()))).url if is_up else "127.0.0.1:1"
            settings = {"triton_url": address, "config": str(tmp_path / "gateway.yaml")}
            gateway = stack.enter_context(running_gateway(tmp_path / "gateway", ready=False, **settings))
            await asyncio.to_thread(eventually, lambda: message in gateway.log)
            assert [json.loads(line)["message"] for line in gateway.log.splitlines()].count(message) == 1

    asyncio.run(run())


def test_the_first_call_that_is_shown_is_one_that_a_person_can_read() -> None:
    """An ensemble over a text comes before one over numbers, a plain model, and values that are too long to list."""
    text, numbers = model("T BYTES [1]", "Y FP32 [4]"), model("X FP32 [4]", "Y FP32 [4]")
    best = [
        pipeline(text, sample={"T": "a"}),
        pipeline(ensemble("whole", text), text),
        pipeline(ensemble("whole", numbers), numbers),
        pipeline(text),
        pipeline(numbers),
        pipeline(model("X FP32 [3,640,640]", "Y FP32 [4]")),
    ]
    keys = [hard_to_try(each) for each in best]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_a_process_that_starts_gets_no_connections_of_a_shared_port() -> None:
    """They would wait for its start, and be reset if it fails."""
    with (
        reserved("127.0.0.1", 0, "PORT") as port,
        listening("127.0.0.1", port, "PORT", shares_port=True) as serving,
        listening("127.0.0.1", port, "PORT", shares_port=True),
        ExitStack() as clients,
    ):
        serving.listen()
        serving.settimeout(5)
        for _ in range(50):
            clients.enter_context(create_connection(("127.0.0.1", port)))
            clients.enter_context(serving.accept()[0])


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_only_an_address_that_cannot_be_right_is_reported() -> None:
    """Not a Triton that runs, or that may be about to start."""
    assert await wrong_address("triton.invalid:8001") == "the host name 'triton.invalid' is not known"
    async with serving(FakeTriton()) as triton:
        assert await wrong_address(triton.url) is None
    assert await wrong_address(triton.url) is None
    assert await wrong_address("unix:/run/triton.sock") is None


async def test_the_http_port_of_triton_is_reported_at_once(http_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    class Down:
        is_ready = triton_is_up = False

    announcing = asyncio.create_task(announce(Down(), "http://127.0.0.1:1", f"127.0.0.1:{http_port}"))
    printed = ""
    async with asyncio.timeout(1.5):
        while HTTP_PORT not in printed:
            await asyncio.sleep(0.01)
            printed += capfd.readouterr().err
    announcing.cancel()


SERVE_WITH_A_FAILING_REFRESH = """
import sys
from app import cli
from app.process import gateway

async def failing(*_: object) -> None:
    raise ZeroDivisionError("the cause")

gateway.Refresh.run = failing
sys.exit(cli.main(["serve"]))
"""


def test_a_failed_background_task_ends_the_process_with_status_1(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ready=False, script=SERVE_WITH_A_FAILING_REFRESH, **WITHOUT_TRITON) as gateway:
        assert gateway.process.wait(PATIENCE_S) == 1
        (line,) = (line for line in gateway.log.splitlines() if "ended unexpectedly" in line)
    assert "'catalog refresh'" in line
    assert "ZeroDivisionError: the cause" in line


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


# Listening sockets: no second process can open a port, and connections get an answer instead of a reset.


def test_a_port_belongs_to_one_socket_until_its_block_ends() -> None:
    with listening("127.0.0.1", 0, "GATEWAY_PORT") as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5) as client:  # before the server runs
            assert client.getpeername() == first.getsockname()
        taken = pytest.raises(match=f"GATEWAY_PORT: cannot listen on 127.0.0.1:{port}")
        with taken, listening("127.0.0.1", port, "GATEWAY_PORT"):
            pass
    with listening("127.0.0.1", port, "GATEWAY_PORT") as second:
        assert second.getsockname()[1] == port
    unknown = pytest.raises(match=r"GATEWAY_PORT: cannot listen on host\.invalid:0")
    with unknown, listening("host.invalid", 0, "GATEWAY_PORT"):
        pass


def test_a_reserved_port_is_for_the_sockets_that_share_it() -> None:
    """It gets no connections itself. The kernel alone would allow other sockets of the same user to join."""
    with reserved("127.0.0.1", 0, "GATEWAY_PORT") as port, ExitStack() as stack:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        open_one = partial(listening, "127.0.0.1", port, "GATEWAY_PORT", shares_port=True)
        listeners = [stack.enter_context(open_one()) for _ in range(2)]
        for each in listeners:
            each.listen(64)
        clients = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(64)]
        for each in listeners:
            each.setblocking(False)
            each.accept()[0].close()  # each socket has received connections
        for client in clients:
            client.close()
        for again in (listening("127.0.0.1", port, "GATEWAY_PORT"), reserved("127.0.0.1", port, "X")):
            with pytest.raises(match=f"cannot listen on 127.0.0.1:{port}"), again:
                pass


SERVE_WITH_A_LIMIT = """
import resource, sys
from app import cli
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
sys.exit(cli.main(["serve"]))
"""
WARNING = "the limit of open files is"


@contextmanager
def limited(folder: Path, soft: int, hard: int, **settings: str) -> Iterator[GatewayProcess]:
    script = SERVE_WITH_A_LIMIT.format(soft=soft, hard=hard)
    with running_gateway(folder, ready=False, script=script, **WITHOUT_TRITON, **settings) as gateway:
        eventually(lambda: is_live(gateway))
        yield gateway


def is_live(gateway: GatewayProcess) -> bool:
    try:
        return httpx.get(f"{gateway.url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_connections_above_a_low_limit_of_files_get_429(tmp_path: Path) -> None:
    with limited(tmp_path, 200, 200) as gateway, ExitStack() as stack:
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
    with limited(tmp_path, 256, 8192, workers=workers) as gateway:
        parent = psutil.Process(gateway.process.pid)
        for process in parent.children() or [parent]:  # one worker answers while the other still starts
            eventually(lambda process=process: process.rlimit(resource.RLIMIT_NOFILE) == (soft, 8192))  # type: ignore[misc]
        assert WARNING not in gateway.log


def test_a_process_without_free_descriptors_logs_and_counts_it(tmp_path: Path) -> None:
    with limited(tmp_path, 1024, 8192) as gateway:
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


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise ZeroDivisionError("the cause")


async def returning() -> None:
    pass


async def test_a_task_runs_for_the_duration_of_its_block() -> None:
    """Its end is a cancellation, or a function that stops it."""
    supervisor, stop = Supervisor(), asyncio.Event()

    async def until_stopped() -> None:
        await stop.wait()

    async with (
        supervisor.running("watch", forever()),
        supervisor.running("server", until_stopped(), stop=stop.set),
    ):
        watch, server = (
            each for name in ("watch", "server") for each in asyncio.all_tasks() if each.get_name() == name
        )
        assert not watch.done()
        assert not server.done()
    assert (watch.cancelled(), server.cancelled()) == (True, False)
    assert not supervisor.requested.is_set()
    assert not supervisor.has_failed


@pytest.mark.parametrize(("work", "cause"), [(failing, ZeroDivisionError), (returning, type(None))])
async def test_a_task_that_ends_is_logged_and_ends_the_process(
    caplog: pytest.LogCaptureFixture, work: Callable[[], Coroutine[Any, Any, None]], cause: type
) -> None:
    supervisor = Supervisor()
    async with supervisor.running("watch", work()), supervisor.running("other", work()):
        await asyncio.sleep(0.01)
        assert (supervisor.requested.is_set(), supervisor.hurried.is_set()) == (True, False)
    record, _ = (each for each in caplog.records if each.levelno == logging.CRITICAL)
    assert "'watch' ended unexpectedly" in record.getMessage()
    assert isinstance(record.exc_info and record.exc_info[1], cause)
    assert supervisor.has_failed


async def test_an_error_while_a_task_stops_is_a_failure() -> None:
    async def failing_at_the_end() -> None:
        try:
            await forever()
        finally:
            raise ZeroDivisionError

    supervisor = Supervisor()
    async with supervisor.running("watch", failing_at_the_end()):
        await asyncio.sleep(0)
    assert supervisor.has_failed


async def test_a_cancellation_from_outside_is_not_swallowed() -> None:
    async def slow_to_stop() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            raise

    async def outer() -> None:
        async with Supervisor().running("watch", slow_to_stop()):
            await asyncio.sleep(0.01)

    task = asyncio.create_task(outer())
    await asyncio.sleep(0.03)  # the block has ended and waits for its task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_second_signal_skips_the_drain(number: signal.Signals) -> None:
    supervisor = Supervisor()
    supervisor.listen_to_signals()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(supervisor.requested.wait(), 10)
        assert not supervisor.hurried.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(supervisor.hurried.wait(), 10)
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(each)


def test_an_ignored_signal_stays_ignored() -> None:
    """For example, nohup ignores SIGHUP."""
    script = (
        "import asyncio, os, signal\n"
        "from app.process.supervision import Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor(); supervisor.listen_to_signals()\n"
        "    os.kill(os.getpid(), signal.SIGHUP); await asyncio.sleep(0.05)\n"
        "    assert not supervisor.requested.is_set()\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_work_has_its_result_unless_a_signal_cancels_it() -> None:
    supervisor = Supervisor()
    assert await supervisor.unless_requested(asyncio.sleep(0, 7)) == 7
    with pytest.raises(ZeroDivisionError):
        await supervisor.unless_requested(failing())
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asyncio.get_running_loop().call_later(0.01, supervisor.request)
    with pytest.raises(ShutdownRequested):
        await supervisor.unless_requested(work())
    assert cancelled.is_set()
