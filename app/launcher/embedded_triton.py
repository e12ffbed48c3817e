"""Starts a Triton with this process, restarts it when it ends, and stops it with this process.

`EmbeddedTriton` checks over HTTP whether a newly started Triton is ready, and reports the progress of model loading.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx

from app.core.aio import Backoff
from app.launcher.launch import EmbeddedOptions, Launch, Ports
from app.launcher.machine import EmbeddedTritonError, Machine, StartCrashed, refusals
from app.launcher.process import GuardedTriton

_ANSWER_TIMEOUT_S = 2.0
_LIVE_TIMEOUT_S = 5.0


def _client(url: str) -> httpx.AsyncClient:
    """A client of a Triton over HTTP, whose port Triton opens last."""
    return httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S, verify=False, trust_env=False)


async def _is_ready(client: httpx.AsyncClient, nonce: str) -> bool:
    """Whether the server that was started with `--id=nonce` answers and all its models are ready."""
    try:
        server = (await client.get("/v2")).raise_for_status().json()
        models = (await client.post("/v2/repository/index")).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return False
    return server.get("name") == nonce and all(model.get("state") == "READY" for model in models)


OnProgress = Callable[[str], None]
"""Gets a line such as `2 of 8 models ready: ocr`."""
logger = logging.getLogger(__name__)

_POLL_S = 0.05
_STABLE_S = 60.0
LIVENESS_POLL_S = 10.0
LIVENESS_FAILURES = 6
"""As for the sidecar in the chart: a Triton that is live only now and then is not restarted."""
_SIGNALED = 128
"""Added to the number of the signal that ended Triton."""
_FIRST_STARTS = 3
"""How often the first start is attempted if a signal ends Triton while it loads."""


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
        for attempts_left in reversed(range(_FIRST_STARTS)):
            try:
                await self._launch(on_progress)
            except StartCrashed as exc:
                if not attempts_left:
                    raise
                logger.error("%s It is started again.", exc)
            else:
                return

    async def watch(self) -> None:
        """Restarts Triton whenever it exits, with backoff. Returns after `stop`.

        Unexpected exceptions propagate, because without this task Triton would not be restarted.
        """
        backoff = Backoff(self._options.first_restart_s, self._options.longest_restart_s)
        while not self._stopping.is_set():
            since = time.monotonic()
            status = await self._ended()
            if time.monotonic() - since > _STABLE_S:
                backoff.reset()
            if not self._stopping.is_set():
                logger.error("the embedded Triton ended with %s and is started again", self._end(status))
            while not await _happens_within(backoff.fail(), self._stopping.wait()):
                try:
                    await self._launch()
                    break
                except (EmbeddedTritonError, OSError) as exc:
                    logger.error("the embedded Triton could not be started again: %s", exc)

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
                while not await _is_ready(client, triton.launch.nonce):
                    if self._stopping.is_set():
                        raise EmbeddedTritonError("Triton was stopped before it was ready.")
                    if triton.has_ended and triton.status > _SIGNALED and not triton.log.failures:
                        end = self._end(triton.status)
                        raise StartCrashed(f"Triton crashed while it loaded its models, with {end}.")
                    if triton.has_ended:
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
        on_progress(f"{len(names)} of {len(names)} models ready")

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
            while not await _happens_within(LIVENESS_POLL_S, triton.ended()):
                try:
                    is_live = (await client.get("/v2/health/live", timeout=_LIVE_TIMEOUT_S)).is_success
                except httpx.HTTPError:
                    is_live = False
                failures = 0 if is_live else failures + 1
                if failures == LIVENESS_FAILURES and not triton.has_ended:
                    logger.error("the embedded Triton failed %d liveness checks in a row: it is killed", failures)
                    await triton.kill()
        return triton.status


async def _happens_within(delay_s: float, event: Awaitable[object]) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await event
            return True
    return False
