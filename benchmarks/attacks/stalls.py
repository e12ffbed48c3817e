"""Requests that are small and expensive: how long each stops the event loop.

The gateway's application runs in this process with the reference pipelines and an engine that runs no model. A timer on
the same event loop fires every millisecond; its longest gap is the time in which no other request is served.
"""

import asyncio
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope

from app.api.inference import Inference
from app.api.limits import Limits
from app.core.engine import InferenceServer
from app.core.errors import ModelNotReady
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, ModelState
from app.main import Gateway, create_app
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.pipelines.run import Canceller
from app.streams.memory_store import MemoryStore
from app.triton.repository import read_repository
from benchmarks.attacks.target import Targets
from benchmarks.surroundings import ROOT
from benchmarks.table import Table
from tests.toolkit.exchange import FakeConnection

KIB, MIB = 1024, 1024 * 1024
ROUNDS = 5
TIMER_S = 0.001
BOUNDARY = b"attack"


@dataclass(frozen=True)
class Sent:
    """One request, ``times`` at once."""

    name: str
    path: str
    media_type: str
    body: bytes = b""
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    method: str = "POST"
    times: int = 1


def attacks() -> Iterator[Sent]:
    names = map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2))
    few = "&".join(itertools.islice(names, 128))
    long_names = map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3))
    many = "&".join(itertools.islice(long_names, 3_900))
    yield Sent("a query of 128 names", OCR, "image/png", PNG, few.encode())
    yield Sent("a query of 3,900 names (16 KB)", OCR, "image/png", PNG, many.encode())
    yield Sent("seven heads of semicolons in 64 KiB", OCR, FORM, _heads(7, 8_100))
    yield Sent("125 heads of semicolons in 1 MB", OCR, FORM, _heads(125, 8_100))
    yield Sent("128 heads of 1 KiB", OCR, FORM, _heads(128, 900))
    yield Sent("semicolons in the request's Content-Type", OCR, f"{FORM}{';' * 15_000}", _heads(1, 10))
    deflate = ((b"content-encoding", b"deflate"),)
    yield Sent("8 MB of empty deflate blocks", INFER, "application/json", _empty_blocks(8 * MIB), headers=deflate)
    yield Sent(
        "64 KiB of empty deflate blocks", INFER, "application/json", _empty_blocks(64 * KIB - 8), headers=deflate
    )
    cookie = ((b"cookie", b'a="' + b'\\"' * 7_900 + b'"'),)
    yield Sent("a cookie of escaped quotes (16 KB)", LIVE, "", headers=cookie, method="GET")
    yield Sent("GET /health/live, 1,500 at once", LIVE, "", method="GET", times=1_500)
    yield Sent("GET /openapi.json, once", "/openapi.json", "", method="GET")
    yield Sent("GET /openapi.json, 1,500 at once", "/openapi.json", "", method="GET", times=1_500)


OCR, INFER, LIVE = "/v1/pipelines/ocr", "/v2/models/text_embed/infer", "/health/live"
FORM = f"multipart/form-data; boundary={BOUNDARY.decode()}"
PNG = b"\x89PNG\r\n\x1a\n"


def _heads(count: int, semicolons: int) -> bytes:
    head = b'--%s\r\nContent-Disposition: form-data; name="%d"%s\r\n\r\n\r\n'
    parts = [head % (BOUNDARY, number, b";" * semicolons) for number in range(count)]
    return b"".join([*parts, b"--%s--\r\n" % BOUNDARY])


def _empty_blocks(size: int) -> bytes:
    """A zlib stream of stored blocks without content (RFC 1951, section 3.2.4)."""
    return (
        zlib.compress(b"")[:2] + b"\x00\x00\x00\xff\xff" * (size // 5) + b"\x01\x00\x00\xff\xff" + b"\x00\x00\x00\x01"
    )


async def run(_targets: Targets) -> Sequence[Table]:
    """Takes less than a minute. The application runs in this process, not at a target."""
    async with _application() as app:
        rows = [await _row(app, sent) for sent in attacks()]
    columns = ["requests", "bytes", "longest gap of the timer, ms", "each round", "status"]
    note = f"The smallest, median and largest of {ROUNDS} rounds; the timer fires every {TIMER_S * 1e3:g} ms."
    return [Table("Stalls of the event loop", columns, rows, note)]


async def _row(app: ASGIApp, sent: Sent) -> list[str]:
    gaps: list[float] = []
    statuses: set[int] = set()
    for _ in range(ROUNDS):
        async with _timer() as timer:
            statuses.update(await asyncio.gather(*(_send(app, sent) for _ in range(sent.times))))
        gaps.append(timer.longest_s * 1e3)
    low, *_, high = ordered = sorted(gaps)
    size = len(sent.body) + len(sent.query) + len(sent.media_type)
    each = f"{low:.1f} to {high:.1f}"
    return [sent.name, f"{size:,}", f"{ordered[len(ordered) // 2]:.1f}", each, " ".join(map(str, sorted(statuses)))]


@dataclass
class _Timer:
    longest_s: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def fire(self) -> None:
        now = time.perf_counter()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


@asynccontextmanager
async def _timer() -> AsyncIterator[_Timer]:
    """Measures for the duration of the block."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(TIMER_S)
            timer.fire()

    timer = _Timer()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    timer.longest_s = 0.0
    try:
        yield timer
        await asyncio.sleep(0.005)
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking


async def _send(app: ASGIApp, sent: Sent) -> int:
    """Returns the status."""
    answered: list[int] = []
    body: list[Message] = [{"type": "http.request", "body": sent.body, "more_body": False}]

    async def receive() -> Message:
        if not body:
            await asyncio.Event().wait()  # the client stays connected
        return body.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    await app(_scope(sent, receive), receive, send)
    return answered[0]


def _scope(sent: Sent, receive: Receive) -> Scope:
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(sent.body)), *sent.headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": sent.method,
        "scheme": "http",
        "path": sent.path,
        "raw_path": sent.path.encode(),
        "query_string": sent.query,
        "root_path": "",
        "headers": [*headers, (b"content-type", sent.media_type.encode())],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8080),
        "state": {"connection": FakeConnection(receive)},
    }


class _Repository(InferenceServer):
    """The models of ``triton_models/``, all ready; none runs."""

    def __init__(self, folder: Path) -> None:
        self._configs = {model.folder: model.config for model in read_repository(folder)}

    async def is_live(self) -> bool:
        return True

    async def models(self) -> Sequence[ModelState]:
        return [ModelState(name, "1", ready=True) for name in self._configs]

    async def model_ready(self, model: str, version: str = "") -> bool:
        return model in self._configs

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        return self._configs[model]

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        raise ModelNotReady("No model runs here.")


@asynccontextmanager
async def _application() -> AsyncIterator[ASGIApp]:
    engine = _Repository(ROOT / "triton_models")
    catalog = Catalog(engine, ROOT / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    async with MemoryStore() as store:
        inference = Inference(engine, catalog, Metrics("benchmark"), Canceller(engine))
        yield create_app(Gateway(inference, store, Limits(16 * MIB)), admin_port=8081)
