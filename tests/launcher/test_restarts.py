"""One embedded Triton, which the tests end in different ways and which is started again each time."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from app.launcher import embedded_triton as server
from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.arenas import lock_arenas

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(options_of_module):
    triton = EmbeddedTriton(options_of_module)
    await triton.start()
    watch = asyncio.create_task(triton.watch())
    yield triton
    await triton.stop()
    await asyncio.wait_for(watch, 10.0)


@pytest_asyncio.fixture(loop_scope="module")
async def triton(watched, until_answered):
    """The Triton of this file, which has started."""
    await until_answered(watched)
    return watched


async def test_triton_and_guard_get_no_terminal_signals(triton, traces_of):
    ours = os.getsid(0)
    assert all(os.getsid(each.pid) != ours for each in traces_of(triton.pid).processes())


async def test_a_killed_triton_is_restarted_on_the_same_ports(triton, traces_of, until_restarted, busy):
    traces, url, killed = traces_of(triton.pid), triton.grpc_url, triton.pid
    async with busy(url):
        os.kill(killed, signal.SIGKILL)
        await until_restarted(triton, killed)
    assert triton.grpc_url == url
    assert traces.are_gone()


async def test_restart_replaces_a_stopped_triton(triton, traces_of, until_restarted):
    traces, stopped = traces_of(triton.pid), triton.pid
    os.kill(stopped, signal.SIGSTOP)
    await triton.restart()
    await until_restarted(triton, stopped)
    assert traces.are_gone()


async def test_a_crash_is_logged_with_its_signal(triton, until_restarted, caplog):
    crashed = triton.pid
    os.kill(crashed, signal.SIGSEGV)
    await until_restarted(triton, crashed)
    assert "triton: Signal (11) received." in caplog.messages
    assert "ended with status 139 (SIGSEGV): Signal (11) received." in caplog.text


@pytest.fixture
def short_crashes(monkeypatch):
    monkeypatch.setattr(server, "CRASH_S", 1.0)


@pytest.mark.usefixtures("short_crashes")
@pytest.mark.parametrize("arenas", [1, None], ids=["one lock", "all locks"])
async def test_a_triton_that_hangs_in_its_crash_handler_is_restarted(
    triton, traces_of, until_restarted, caplog, arenas
):
    """The handler of SIGABRT allocates memory, and waits for a lock that the crashed thread holds."""
    traces, hung = traces_of(triton.pid), triton.pid
    assert lock_arenas(hung, arenas)
    os.kill(hung, signal.SIGABRT)
    await until_restarted(triton, hung)
    assert "crashed (Signal (6) received.) and has not ended after 1 s: it is killed" in caplog.text
    assert traces.are_gone()


async def test_a_killed_guard_and_its_triton_are_restarted(triton, traces_of, until_restarted, busy):
    traces, killed = traces_of(triton.pid), triton.pid
    async with busy(triton.grpc_url):
        traces.named("guard.py").kill()
        await until_restarted(triton, killed)
    assert traces.are_gone()


async def test_a_triton_that_fails_its_liveness_checks_is_restarted(triton, until_restarted, caplog, monkeypatch):
    monkeypatch.setattr(server, "LIVENESS_POLL_S", 0.1)
    monkeypatch.setattr(server, "LIVENESS_FAILURES", 2)
    monkeypatch.setattr(server, "_LIVE_TIMEOUT_S", 1.0)
    checked_slowly = triton.pid
    await triton.restart()
    await until_restarted(triton, checked_slowly)
    stopped = triton.pid
    os.kill(stopped, signal.SIGSTOP)
    await until_restarted(triton, stopped)
    assert "failed 2 liveness checks in a row: it is killed" in caplog.text
