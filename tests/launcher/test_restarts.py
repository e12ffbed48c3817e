"""One embedded Triton, which the tests end in different ways and which is started again each time."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from app.launcher import embedded_triton as server
from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from app.triton.repository import served_repository
from tests.launcher.conftest import Traces, busy, until_answered, write_model
from tests.toolkit.arenas import lock_arenas
from tests.toolkit.processes import EXIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory, models_venv):
    """The delays between its restarts do not grow."""
    models, delays = tmp_path_factory.mktemp("embedded") / "models", {"first_restart_s": 0.1, "longest_restart_s": 0.1}
    write_model(models)
    options = EmbeddedOptions(models, models_venv, **delays, exit_timeout_s=EXIT_S, read=served_repository)
    triton = EmbeddedTriton(options)
    await triton.start()
    watch = asyncio.create_task(triton.watch())
    yield triton
    await triton.stop()
    await asyncio.wait_for(watch, 10.0)


@pytest_asyncio.fixture(loop_scope="module")
async def triton(watched):
    """The Triton of this file, which has started."""
    await until_answered(watched)
    return watched


async def test_triton_and_guard_get_no_terminal_signals(triton):
    ours = os.getsid(0)
    assert all(os.getsid(each.pid) != ours for each in Traces.of(triton.pid).processes())


async def test_a_killed_triton_is_restarted_on_the_same_ports(triton):
    traces, url, killed = Traces.of(triton.pid), triton.grpc_url, triton.pid
    async with busy(url):
        os.kill(killed, signal.SIGKILL)
        await until_answered(triton, replaces=killed)
    assert triton.grpc_url == url
    assert traces.are_gone()


async def test_restart_replaces_a_stopped_triton(triton):
    traces, stopped = Traces.of(triton.pid), triton.pid
    os.kill(stopped, signal.SIGSTOP)
    await triton.restart()
    await until_answered(triton, replaces=stopped)
    assert traces.are_gone()


async def test_a_crash_is_logged_with_its_signal(triton, caplog):
    crashed = triton.pid
    os.kill(crashed, signal.SIGSEGV)
    await until_answered(triton, replaces=crashed)
    assert "triton: Signal (11) received." in caplog.messages
    assert "ended with status 139 (SIGSEGV): Signal (11) received." in caplog.text


@pytest.mark.parametrize("arenas", [1, None], ids=["one lock", "all locks"])
async def test_a_triton_that_hangs_in_its_crash_handler_is_restarted(triton, caplog, monkeypatch, arenas):
    """The handler of SIGABRT allocates memory, and waits for a lock that the crashed thread holds."""
    monkeypatch.setattr(server, "CRASH_S", 1.0)
    traces, hung = Traces.of(triton.pid), triton.pid
    assert lock_arenas(hung, arenas)
    os.kill(hung, signal.SIGABRT)
    await until_answered(triton, replaces=hung)
    assert "crashed (Signal (6) received.) and has not ended after 1 s: it is killed" in caplog.text
    assert traces.are_gone()


async def test_a_killed_guard_and_its_triton_are_restarted(triton):
    traces, killed = Traces.of(triton.pid), triton.pid
    async with busy(triton.grpc_url):
        traces.named("guard.py").kill()
        await until_answered(triton, replaces=killed)
    assert traces.are_gone()


async def test_a_triton_that_fails_its_liveness_checks_is_restarted(triton, caplog, monkeypatch):
    monkeypatch.setattr(server, "LIVENESS_POLL_S", 0.1)
    monkeypatch.setattr(server, "LIVENESS_FAILURES", 2)
    monkeypatch.setattr(server, "_LIVE_TIMEOUT_S", 1.0)
    checked_slowly = triton.pid
    await triton.restart()
    await until_answered(triton, replaces=checked_slowly)
    stopped = triton.pid
    os.kill(stopped, signal.SIGSTOP)
    await until_answered(triton, replaces=stopped)
    assert "failed 2 liveness checks in a row: it is killed" in caplog.text
