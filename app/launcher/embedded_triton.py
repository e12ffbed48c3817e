"""Starts a Triton with this process, restarts it when it ends, and stops it with this process.

`EmbeddedTriton` checks over HTTP whether a newly started Triton is ready, and reports the progress of model loading.
`GuardedTriton` is one Triton below its guard process, and `TritonLog` reads its log: a Triton that announces a crash
there may hang in its crash handler (`is_crashing`), and then it is killed.
"""

import asyncio
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from app.core.aio import Backoff
from app.launcher import guard
from app.launcher.changes import reload_changed
from app.launcher.launch import REQUIREMENTS, EmbeddedOptions, Launch, Ports
from app.launcher.machine import EmbeddedTritonError, Machine, StartCrashed, refusals

logger = logging.getLogger(__name__)

_CRASHES = (1 << signal.SIGABRT - 1) | (1 << signal.SIGSEGV - 1)
_ORDERLY = 1 << signal.SIGTERM - 1


def is_crashing(pid: int) -> bool:
    """Whether a thread of the process runs a handler of SIGABRT or SIGSEGV.

    The kernel blocks a signal in the thread that handles it. A thread that blocks SIGTERM too blocks signals for
    another reason. Source: signal(7), sigaction(2), proc_pid_status(5).
    """
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread ended
            (blocked,) = re.findall(r"^SigBlk:\s*(\w+)", status.read_text(), re.MULTILINE)
            if (mask := int(blocked, 16)) & _CRASHES and not mask & _ORDERLY:
                return True
    return False


_GUARD = str(Path(guard.__file__).resolve())
_LEVELS = {"I": logging.DEBUG, "W": logging.DEBUG, "E": logging.ERROR, "F": logging.CRITICAL}
_PREFIX = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (\S+)\] ?(.*)", re.DOTALL)
_LOADED = re.compile(r"\"successfully loaded '([^']+)'")
_NOT_LOADED = re.compile(r"\"failed to load '([^']+)' version \d+: (.*)\"\Z", re.DOTALL)
_NOT_POLLED = re.compile(r"\"?Poll failed for model directory '([^']+)': (.*?)\"?\Z", re.DOTALL)
# Logged at every start without a GPU, where they are harmless.
_HARMLESS = re.compile(r"CUDA|CudaDriverHelper|NVML|DCGM")
# Lines that models write for GATEWAY_LOG_TENSORS (model_kit.tensor_log). They are shown although other lines are not.
_TENSORS = re.compile(r'"?tensors triton_request_id=')
# What a model prints or logs: model_output.py begins each line with this.
_MODELS = re.compile(r"\"?(?P<text>model '[^']+' (?P<way>prints|writes to stderr|logs): )")
# Rows of the tables that Triton logs at its start. All other messages of Triton have one line each.
_TABLE_ROW = re.compile(r"[+|]")
# Written when Triton is asked to stop.
_STOPPING = re.compile(r"Signal \((?:2|15)\) received\.")
# Written by Triton's handler of SIGABRT and SIGSEGV, and by glibc and libstdc++ before an abort. A model's process may
# write the same words. Sources: triton_signal.cc of Triton's server, malloc.c, assert.c and debug/ of glibc.
_DEATH = re.compile(
    r"Signal \((?:6|11)\) received\."
    r"|(?:malloc|calloc|realloc|free|munmap_chunk|mremap_chunk|malloc_consolidate|tcache_thread_shutdown)\(\): "
    r"|double free or corruption|corrupted (?:size|double-linked)"
    r"|\*\*\* .* detected \*\*\*|Fatal glibc error: |.*: Assertion `.*' failed\."
    r"|terminate called |pure virtual method called"
)
_LINES_KEPT = 400
_LONGEST_LINE = 16 * 1024


class TritonLog:
    """Forwards Triton's log to Python's logging, and keeps the latest lines to explain a failure."""

    def __init__(self) -> None:
        self.death = ""
        """The first line about a crash of Triton or of a model's process; empty if neither crashed."""
        self.loaded: list[str] = []
        self.failures: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._rest = b""
        self._level = logging.DEBUG

    def feed(self, data: bytes) -> None:
        """Adds the next bytes, which may end inside a line. A line that is too long is split."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line[:_LONGEST_LINE].decode("utf-8", "replace").rstrip())

    def explanation(self) -> str:
        """Returns why Triton exited, according to its log: the models that failed, otherwise its last errors."""
        if self.failures:
            return _listed(self.failures)
        begins = ("E", "F", "error:", "Failed")
        errors = [line for line in self._lines if line.startswith(begins) and not _HARMLESS.search(line)]
        return "\n".join(errors or [*self._lines][-8:]) or "it wrote no log"

    def _take(self, line: str) -> None:
        self._lines.append(line)
        named = None
        if match := _PREFIX.match(line):
            message = match[3]
            named = _MODELS.match(message)
            is_shown = named is not None or _TENSORS.match(message) is not None
            self._level = max(logging.INFO, _LEVELS[match[1]]) if is_shown else _LEVELS[match[1]]
            if found := _LOADED.match(message):
                self.loaded.append(found[1])
            elif found := _NOT_LOADED.match(message) or _NOT_POLLED.match(message):
                self.failures[found[1].rpartition("/")[2]] = found[2].replace("\\n", "\n").strip()
        elif _DEATH.match(line):  # as the other lines without a prefix, not by Triton's logger
            self.death = self.death or line
            self._level = logging.ERROR
        elif named := _MODELS.match(line):
            self._level = logging.INFO if named["way"] == "prints" else logging.WARNING
        elif line and not _TABLE_ROW.match(line):
            self._level = logging.DEBUG if _STOPPING.match(line) else logging.WARNING
        if named is not None:
            logger.log(self._level, "%s", named.string[named.start("text") :].strip('"'))
        elif line and not _HARMLESS.search(line):
            logger.log(self._level, "triton: %s", line)


def _listed(reasons: Mapping[str, str]) -> str:
    return "\n".join(f"model {name!r}: {reason}" for name, reason in sorted(reasons.items()))


CRASH_S = 5.0
"""How long Triton may take to end after it has announced a crash. Its crash handler may deadlock, because it allocates
memory and starts processes."""


class GuardedTriton:
    """Created by `start`; runs until `ended` is done."""

    def __init__(self, launch: Launch, process: Process, pid: int, log: asyncio.StreamReader) -> None:
        self.launch = launch
        self.pid = pid
        self.log = TritonLog()
        self._process = process
        self._dying: asyncio.Task[None] | None = None
        self.ended = asyncio.ensure_future(self._run(log))
        """Done when Triton, its guard and their files are gone; its result is Triton's exit status (128 + signal)."""

    @classmethod
    async def start(cls, launch: Launch) -> "GuardedTriton":
        """Starts the guard in its own process group, so that Ctrl-C in the terminal reaches only the gateway."""
        log, log_end = os.pipe()
        command = [
            *(sys.executable, "-I", "-S", _GUARD),
            f"--shm-prefix={launch.shm_prefix}",
            f"--folder={launch.folder}",
            f"--grace-s={launch.options.exit_timeout_s + 2.0}",
            *(f"--env={name}={value}" for name, value in launch.environment().items()),
            "--",
            *launch.command(),
        ]
        environment = dict(launch.options.environment)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=log_end, env=environment, start_new_session=True
            )
        finally:
            os.close(log_end)
        assert process.stdout is not None
        if not (pid := await process.stdout.readline()):
            raise EmbeddedTritonError("The process that guards Triton ended before it had started Triton.")
        # With a pipe of asyncio, `Process.wait` may wait for every process that holds the pipe, also orphaned stubs.
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(log, "rb", 0))
        return cls(launch, process, int(pid), reader)

    async def stop(self) -> None:
        """Closes the guard's pipe, so that the guard ends Triton, and waits."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.shield(self.ended)

    async def kill(self) -> None:
        """Kills an unresponsive Triton without its exit timeout, and waits."""
        guard.end_group(self.pid)
        await asyncio.shield(self.ended)

    async def _run(self, log: asyncio.StreamReader) -> int:
        relay = asyncio.ensure_future(self._relay(log))
        status = await self._process.wait()
        if status < 0:
            # The guard was killed, and the kernel killed Triton too. Its stubs and shared memory remain.
            guard.end_group(self.pid)
            guard.discard(self.launch.shm_prefix, self.launch.folder)
        await relay
        if self._dying is not None:
            self._dying.cancel()
        return status if status >= 0 else 128 - status

    async def _relay(self, log: asyncio.StreamReader) -> None:
        while data := await log.read(65536):
            self.log.feed(data)
            if self.log.death and (self._dying is None or self._dying.done()):
                self._dying = asyncio.create_task(self._kill_if_crashing())

    async def _kill_if_crashing(self) -> None:
        """Kills a Triton whose crash handler hangs. A model may write the same words: then nothing happens."""
        death = self.log.death
        await asyncio.sleep(CRASH_S)
        if is_crashing(self.pid):
            logger.error("the embedded Triton crashed (%s) and has not ended after %g s: it is killed", death, CRASH_S)
            guard.end_group(self.pid)
        else:
            self.log.death = ""


_ANSWER_TIMEOUT_S = 2.0
_LIVE_TIMEOUT_S = 5.0


def _client(url: str) -> httpx.AsyncClient:
    """A client of a Triton over HTTP, whose port Triton opens last."""
    return httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S, verify=False, trust_env=False)


async def _unready(client: httpx.AsyncClient, launch: Launch) -> dict[str, str] | None:
    """Why models are not ready, by name. None until the server of this start answers and has tried to load all."""
    try:
        server = (await client.get("/v2")).raise_for_status().json()
        models = (await client.post("/v2/repository/index")).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None
    known = {model["name"]: model for model in models if model.get("state")}
    if server.get("name") != launch.nonce or any(each["state"] not in _LOADED_OR_FAILED for each in known.values()):
        return None
    wanted = {name: known.get(name, {}) for name in launch.repository.models}
    return {name: each.get("reason", "") for name, each in wanted.items() if each.get("state") != "READY"}


_LOADED_OR_FAILED = ("READY", "UNAVAILABLE")
_NO_MODULE = re.compile(r"No module named '(\w+)")


OnProgress = Callable[[str], None]
"""Gets a line such as `2 of 8 models ready: ocr`."""
_POLL_S = 0.05
_STABLE_S = 60.0
LIVENESS_POLL_S = 10.0
LIVENESS_FAILURES = 6
"""As for the chart's sidecar: only failures in a row restart Triton."""
_SIGNALED = 128
"""Added to the number of the signal that ended Triton."""
_MORE_FIRST_STARTS = 2
"""How often the first start is repeated if a signal ends Triton while it loads."""


class EmbeddedTriton:
    """Call `start`, run `watch` as a background task, call `stop`.

    The addresses are chosen at the first start and stay the same over restarts.
    """

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        self._ports = options.ports or Ports.free(options.host)
        self._triton: GuardedTriton | None = None
        self._launching = asyncio.Lock()
        self._stopping = asyncio.Event()

    @property
    def grpc_url(self) -> str:
        """`host:port` of Triton's gRPC service."""
        return f"{self._options.host}:{self._ports.grpc}"

    @property
    def http_url(self) -> str:
        """Address of Triton's HTTP service. Never show it to clients of the gateway."""
        return f"http://{self._options.host}:{self._ports.http}"

    @property
    def metrics_url(self) -> str:
        """Address of Triton's Prometheus metrics."""
        return f"http://{self._options.host}:{self._ports.metrics}/metrics"

    @property
    def pid(self) -> int | None:
        """Process id of `tritonserver`; None before the first start."""
        return self._triton.pid if self._triton else None

    async def start(self, on_progress: OnProgress = lambda _: None) -> None:
        """Starts Triton and waits until every model is ready. Raises `EmbeddedTritonError` with the reason.

        A Triton that crashes while it loads is started again, twice at most.
        """
        for message in refusals(Machine.here()):
            raise EmbeddedTritonError(message)
        for _ in range(_MORE_FIRST_STARTS):
            try:
                return await self._launch(on_progress)
            except StartCrashed as exc:
                logger.error("%s It is started again.", exc)
        return await self._launch(on_progress)

    async def watch(self) -> None:
        """Restarts Triton whenever it exits, with backoff. Returns after `stop`.

        Unexpected exceptions propagate, because without this task Triton would not be restarted.
        """
        options = self._options
        backoff = Backoff(options.first_restart_s, options.longest_restart_s, forgiven_s=_STABLE_S)
        while not self._stopping.is_set():
            status = await self._ended()
            if not self._stopping.is_set():
                logger.error("the embedded Triton ended with %s and is started again", self._end(status))
            while not await _happens_within(backoff.fail(), self._stopping.wait()):
                try:
                    await self._launch()
                    break
                except (EmbeddedTritonError, OSError) as exc:
                    logger.error("the embedded Triton could not be started again: %s", exc)

    async def reload_changed(self) -> None:
        """Loads a model again when its files change, as long as it runs. A second background task, like `watch`."""
        async with _client(self.http_url) as client:
            await reload_changed(self._options.repository, self._options.read, client)

    @property
    def is_starting(self) -> bool:
        """Whether Triton is being started. It may answer already."""
        return self._launching.locked()

    async def restart(self) -> None:
        """Kills a Triton that does not work, so that `watch` starts it again. Does nothing while Triton starts."""
        if self._triton is not None and not self.is_starting:
            await self._triton.kill()

    async def stop(self) -> None:
        """Ends Triton and all its processes, and waits until they are gone."""
        self._stopping.set()
        async with self._launching:
            if self._triton is not None:
                await self._triton.stop()

    async def _launch(self, on_progress: OnProgress = lambda _: None) -> None:
        async with self._launching:
            launch = await asyncio.to_thread(Launch.prepare, self._options, self._ports)
            self._triton = triton = await GuardedTriton.start(launch)
            try:
                await self._until_ready(triton, on_progress)
            except BaseException:
                await triton.stop()
                raise

    async def _until_ready(self, triton: GuardedTriton, on_progress: OnProgress) -> None:
        names, loaded = triton.launch.repository.models, triton.log.loaded
        shown, progress = "", f"0 of {len(names)} models ready"
        try:
            async with asyncio.timeout(self._options.start_timeout_s), _client(self.http_url) as client:
                while (unready := await _unready(client, triton.launch)) is None:
                    if self._stopping.is_set():
                        raise EmbeddedTritonError("Triton was stopped before it was ready.")
                    if triton.ended.done() and triton.ended.result() > _SIGNALED and not triton.log.failures:
                        end = self._end(triton.ended.result())
                        raise StartCrashed(f"Triton crashed while it loaded its models, with {end}.")
                    if triton.ended.done():
                        raise EmbeddedTritonError(f"Triton did not start:\n{triton.log.explanation()}")
                    progress = f"{len(loaded)} of {len(names)} models ready"
                    text = f"{progress}: {loaded[-1]}" if loaded else progress
                    if text != shown:
                        on_progress(text)
                    shown = text
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as exc:
            missing = ", ".join(name for name in names if name not in loaded)
            late = f"Triton was not ready after {self._options.start_timeout_s:g} s: {progress}."
            raise EmbeddedTritonError(f"{late} Not loaded: {missing}." if missing else late) from exc
        if len(unready) == len(names):
            raise EmbeddedTritonError(f"Triton serves none of the models:\n{_listed(unready)}")
        on_progress(f"{len(names) - len(unready)} of {len(names)} models ready")
        for name, reason in {**triton.launch.repository.refused, **unready}.items():
            hint = ""
            if found := _NO_MODULE.search(reason):
                file = self._options.repository / REQUIREMENTS
                hint = f"\nTo install it into the models' environment: echo {found[1]} >> {file}, and start again."
            logger.error("model '%s' is not served: %s%s", name, reason or "Triton did not load it", hint)

    def _end(self, status: int) -> str:
        """Describes how Triton ended, with the line of its log that announced a crash."""
        death = self._triton.log.death if self._triton is not None else ""
        number = status - _SIGNALED
        name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
        return f"status {status}{name}" + (f": {death}" if death else "")

    async def _ended(self) -> int:
        """Waits until Triton has ended. Kills a Triton that fails too many liveness checks in a row."""
        assert self._triton is not None, "watch() follows start()"
        triton, failures = self._triton, 0
        async with _client(self.http_url) as client:
            while not await _happens_within(LIVENESS_POLL_S, asyncio.shield(triton.ended)):
                try:
                    is_live = (await client.get("/v2/health/live", timeout=_LIVE_TIMEOUT_S)).is_success
                except httpx.HTTPError:
                    is_live = False
                failures = 0 if is_live else failures + 1
                if failures == LIVENESS_FAILURES and not triton.ended.done():
                    logger.error("the embedded Triton failed %d liveness checks in a row: it is killed", failures)
                    await triton.kill()
        return triton.ended.result()


async def _happens_within(delay_s: float, event: Awaitable[object]) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await event
            return True
    return False
