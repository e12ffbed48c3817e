"""The embedded server: the real Triton of the wheel with one tiny model.

The last tests end one Triton in different ways, which is started again each time.
"""

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from app.launcher import embedded_triton
from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import LOOPBACK, EmbeddedOptions, Ports
from app.launcher.machine import EmbeddedTritonError, StartCrashed
from app.triton.repository import served_repository
from tests.launcher.conftest import Traces, busy, infer, until_answered, write_model
from tests.toolkit.arenas import lock_arenas
from tests.toolkit.processes import EXIT_S, is_free
from tests.toolkit.waiting import eventually, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[2]
ORDERLY_S = 15
"""Triton 2.51 may crash when its time to exit is over before its models have ended."""

# A minimal gateway: starts Triton, prints its address, and waits to be killed.
GATEWAY = """
import asyncio, sys
from pathlib import Path
from app.launcher.launch import EmbeddedOptions
from app.launcher.embedded_triton import EmbeddedTriton

async def main():
    triton = EmbeddedTriton(EmbeddedOptions(Path(sys.argv[1]), Path(sys.argv[2]), exit_timeout_s=1))
    await triton.start()
    print(triton.pid, triton.grpc_url, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def gateway(options):
    arguments = [sys.executable, "-c", GATEWAY, str(options.repository), str(options.venv)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@asynccontextmanager
async def running(options, on_progress=lambda _: None, **changes):
    triton = EmbeddedTriton(replace(options, **changes))
    await triton.start(on_progress)
    try:
        yield triton
    finally:
        await triton.stop()


async def test_start_reports_progress_and_stop_removes_processes_and_files(options, tmp_path, monkeypatch):
    """Paths may have spaces. The models load slowly enough for a report before the first one is ready."""
    repository, temporary = tmp_path / "the $models", tmp_path / "temporary files"
    for name in ("ident", "second"):
        write_model(repository, name, initialize="time.sleep(1)")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    reported = []
    async with running(options, reported.append, repository=repository, exit_timeout_s=ORDERLY_S) as triton:
        traces = Traces.of(triton.pid)
        assert reported[0] == "0 of 2 models ready"
        assert reported[-1] == "2 of 2 models ready"
        assert all(earlier != later for earlier, later in pairwise(reported))
        assert await infer(triton.grpc_url) == 0.0
        assert len(traces.processes()) == 4
        assert traces.regions()
    assert traces.are_gone()
    assert (repository / "ident" / "config.pbtxt").is_file()


async def test_a_model_that_does_not_load_is_reported_and_the_others_are_served(options, add_model, caplog):
    """The message has the command that installs a missing package."""
    add_model("needy", initialize="import a_missing_package.part")
    (options.repository / "__pycache__").mkdir()
    reported = []
    async with running(options, reported.append) as triton:
        assert reported[-1] == "1 of 2 models ready"
        assert await infer(triton.grpc_url) == 0.0
    (text,) = [text for text in caplog.messages if text.startswith("model 'needy' is not served: ")]
    assert "No module named 'a_missing_package'" in text
    assert f"echo a_missing_package >> {options.repository}/requirements.txt, and start again." in text


SPEAKS = (
    "import sys; print('a', 'line'); print('to stderr', file=sys.stderr); "
    "import triton_python_backend_utils as utils; utils.Logger.log_info('by the logger'); "
    "utils.Logger.log_info('tensors triton_request_id=1')"
)


async def test_what_a_model_prints_and_logs_has_its_name(options, caplog):
    caplog.set_level("INFO")
    write_model(options.repository, "speaks", initialize=SPEAKS)
    async with running(options):
        pass
    said = {(each.levelname, each.getMessage()) for each in caplog.records}
    assert said >= {
        ("INFO", "model 'speaks' prints: a line"),
        ("WARNING", "model 'speaks' writes to stderr: to stderr"),
        ("INFO", "model 'speaks' logs: by the logger"),
    }
    assert any(text.endswith('"tensors triton_request_id=1"') for _, text in said)


async def test_a_changed_model_is_loaded_and_a_broken_change_keeps_it(options, caplog):
    """Also a model that is added. Hidden files and compiled modules do not count."""
    caplog.set_level("INFO")
    script = options.repository / "ident" / "1" / "model.py"

    async def until_logged(text: str) -> None:
        await until(lambda: any(each.startswith(text) for each in caplog.messages))

    async with running(options) as triton:
        watch = asyncio.create_task(triton.reload_changed())
        await asyncio.sleep(1)
        for ignored in (".model.py.swp", "__pycache__/model.pyc"):
            (script.parent / ignored).parent.mkdir(exist_ok=True)
            (script.parent / ignored).touch()
        good = script.read_text()
        script.write_text(good.replace("class ", "class : "))
        await until_logged("model 'ident' cannot be loaded; Triton keeps what it had: ")
        assert await infer(triton.grpc_url) == 0.0
        script.write_text(good.replace("pass", "print('changed')", 1))
        await until_logged("model 'ident' prints: changed")
        shutil.copytree(script.parents[1], options.repository / "added", ignore=shutil.ignore_patterns("1"))
        await until_logged("model 'added' cannot be loaded; Triton keeps what it had: ")  # its script is missing
        shutil.copytree(script.parent, options.repository / "added" / "1")
        await until_logged("model 'added' was changed and is loaded")
        assert [text for text in caplog.messages if "is loaded" in text] == [
            f"model '{name}' was changed and is loaded" for name in ("ident", "added")
        ]
        assert await infer(triton.grpc_url) == 0.0
        watch.cancel()


async def test_stopping_a_busy_model_takes_a_limited_time(options):
    async with running(options) as triton, busy(triton.grpc_url):
        traces, before = Traces.of(triton.pid), time.monotonic()
        await triton.stop()
        assert time.monotonic() - before < 6
        assert traces.are_gone()


async def test_a_killed_gateway_stops_a_busy_triton(gateway):
    pid, url = gateway.stdout.readline().split()
    traces = Traces.of(int(pid))
    async with busy(url):
        gateway.kill()
        await asyncio.to_thread(eventually, traces.are_gone)


async def test_a_model_that_writes_the_words_of_a_crash_ends_nothing(options, add_model, monkeypatch):
    monkeypatch.setattr(embedded_triton, "CRASH_S", 0.2)
    add_model("loud", initialize='import os; os.write(2, b"Signal (6) received.\\nfree(): invalid pointer\\n")')
    async with running(options) as triton:
        watch, pid = asyncio.create_task(triton.watch()), triton.pid
        await asyncio.sleep(1.0)
        assert await infer(triton.grpc_url) == 0.0
        assert triton.pid == pid
    await watch


def kills_triton(counter: Path, times: int) -> str:
    """Code of a model that aborts Triton in its first ``times`` loads."""
    return (
        f"import os; starts = open({str(counter)!r}, 'ab'); starts.write(b'.'); starts.flush(); "
        f"starts.tell() > {times} or (os.kill(os.getppid(), 6), time.sleep(600))"
    )


async def test_a_triton_that_crashes_while_it_loads_is_started_again(options, add_model, tmp_path, caplog):
    add_model("deadly", initialize=kills_triton(tmp_path / "starts", 2))
    async with running(options) as triton:
        assert await infer(triton.grpc_url) == 0.0
    reason = "Triton crashed while it loaded its models, with status 134 (SIGABRT)."
    assert caplog.messages.count(f"{reason} It is started again.") == 2


async def test_the_first_start_is_repeated_twice_at_most(options, add_model, tmp_path):
    add_model("deadly", initialize=kills_triton(tmp_path / "starts", 9))
    with pytest.raises(StartCrashed, match="SIGABRT"):
        await EmbeddedTriton(options).start()
    assert (tmp_path / "starts").read_bytes() == b"..."


async def test_an_unexpected_exception_ends_the_watch(options, monkeypatch):
    """The supervisor of the process handles the exception."""

    async def fail():
        raise ZeroDivisionError

    async with running(options) as triton:
        monkeypatch.setattr(triton, "_launch", fail)
        os.kill(triton.pid, signal.SIGKILL)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(triton.watch(), 10.0)


async def test_stop_between_two_restarts_ends_the_watch(options):
    async with running(options, first_restart_s=600.0, longest_restart_s=600.0) as triton:
        watch = asyncio.create_task(triton.watch())
        os.kill(triton.pid, signal.SIGKILL)
        await asyncio.sleep(1.0)
    await asyncio.wait_for(watch, 1.0)


async def test_a_restart_waits_until_its_port_is_free(options, caplog):
    async with running(options, longest_restart_s=0.2) as triton:
        port = int(triton.grpc_url.rpartition(":")[2])
        os.kill(triton.pid, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: is_free(port))
        with socket.create_server((LOOPBACK, port)):
            watch = asyncio.create_task(triton.watch())
            await asyncio.to_thread(eventually, lambda: f"Port {port}" in caplog.text)
        await until_answered(triton)
    await watch


async def test_a_port_of_another_process_is_reported(options):
    ports = Ports.free()
    with (
        socket.create_server((LOOPBACK, ports.http)),
        pytest.raises(EmbeddedTritonError, match=f"Port {ports.http}.*HTTP"),
    ):
        await EmbeddedTriton(replace(options, ports=ports)).start()


async def test_the_error_has_the_reason_of_a_model_that_failed_once(options, add_model, tmp_path):
    """Another attempt would not help. Here no other model is left to serve."""
    starts = tmp_path / "starts"
    shutil.rmtree(options.repository / "ident")
    add_model("broken", initialize=f"open({str(starts)!r}, 'ab').write(b'.'); raise ValueError('no weights')")
    with pytest.raises(EmbeddedTritonError, match=r"(?s)none of the models.*model 'broken'.*ValueError: no weights"):
        await EmbeddedTriton(replace(options, exit_timeout_s=ORDERLY_S)).start()
    assert starts.read_bytes() == b"."


@pytest.mark.parametrize(
    ("owner", "function", "text"),
    [
        (tempfile, "mkdtemp", r"No space left on device.*TMPDIR"),
        (tempfile, "gettempdir", r"No space left on device.*TMPDIR"),
        (Path, "symlink_to", "No space left on device"),
    ],
)
async def test_a_full_disk_is_an_error_and_keeps_no_folder(options, monkeypatch, owner, function, text):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    temporary = options.repository.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(owner, function, full)
    with pytest.raises(EmbeddedTritonError, match=text):
        await EmbeddedTriton(options).start()
    assert not list(temporary.iterdir())


async def test_a_slow_model_ends_the_start_with_a_timeout(options, add_model):
    add_model("slow", initialize="time.sleep(600)")
    for timeout_s in (2.0, 8.0, 32.0):  # longer where the other model needs longer than that
        started = []
        triton = EmbeddedTriton(replace(options, start_timeout_s=timeout_s))
        with pytest.raises(EmbeddedTritonError) as error:
            await triton.start(lambda loading, triton=triton, started=started: started.append(triton.pid))
        with pytest.raises(ProcessLookupError):
            os.kill(started[0], 0)
        if "1 of 2 models ready. Not loaded: slow." in str(error.value):
            return
    raise error.value


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


async def test_a_crash_is_logged_with_its_signal_and_triton_restarts_on_the_same_ports(triton, caplog):
    traces, url, crashed = Traces.of(triton.pid), triton.grpc_url, triton.pid
    async with busy(url):
        os.kill(crashed, signal.SIGSEGV)
        await until_answered(triton, replaces=crashed)
    assert triton.grpc_url == url
    assert traces.are_gone()
    assert "triton: Signal (11) received." in caplog.messages
    assert "ended with status 139 (SIGSEGV): Signal (11) received." in caplog.text


@pytest.mark.parametrize("arenas", [1, None], ids=["one lock", "all locks"])
async def test_a_triton_that_hangs_in_its_crash_handler_is_restarted(triton, caplog, monkeypatch, arenas):
    """The handler of SIGABRT allocates memory, and waits for a lock that the crashed thread holds."""
    monkeypatch.setattr(embedded_triton, "CRASH_S", 1.0)
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
    monkeypatch.setattr(embedded_triton, "LIVENESS_POLL_S", 0.1)
    monkeypatch.setattr(embedded_triton, "LIVENESS_FAILURES", 2)
    monkeypatch.setattr(embedded_triton, "_LIVE_TIMEOUT_S", 1.0)
    checked_slowly = triton.pid
    await triton.restart()
    await until_answered(triton, replaces=checked_slowly)
    stopped = triton.pid
    os.kill(stopped, signal.SIGSTOP)
    await until_answered(triton, replaces=stopped)
    assert "failed 2 liveness checks in a row: it is killed" in caplog.text
