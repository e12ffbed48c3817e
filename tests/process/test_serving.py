"""The start of the process: its messages on the terminal, its signals, and its exit status."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from app.process.serving import HTTP_PORT, announce, hard_to_try, wrong_address
from tests.conftest import Require
from tests.toolkit.models import ensemble, model, pipeline
from tests.toolkit.processes import WITHOUT_TRITON, running_gateway
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
