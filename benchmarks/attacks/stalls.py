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

from starlette.types import ASGIApp

from app.api.bodies import Limits
from app.core.errors import ModelNotReady
from app.triton.repository import read_repository
from benchmarks.micro.exchange import request
from benchmarks.surroundings import ROOT
from benchmarks.table import Table
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import served

KIB, MIB = 1024, 1024 * 1024
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

    async def to(self, app: ASGIApp) -> int:
        """Returns the status."""
        headers = (*self.headers, (b"content-type", self.media_type.encode()))
        return (await request(app, self.path, self.body, headers=headers, query=self.query, method=self.method)).status


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


async def run(rounds: int) -> Sequence[Table]:
    """Takes less than a minute."""
    configs = {model.folder: model.config for model in read_repository(ROOT / "triton_models")}
    engine = FakeEngine(configs, [ModelNotReady("No model runs here.")])
    async with served(engine, ROOT / "gateway.yaml", limits=Limits(16 * MIB)) as gateway:
        rows = [await _row(gateway.app, sent, rounds) for sent in attacks()]
    columns = ["requests", "bytes", "longest gap of the timer, ms", "each round", "status"]
    note = f"The smallest, median and largest of {rounds} rounds; the timer fires every {TIMER_S * 1e3:g} ms."
    return [Table("Stalls of the event loop", columns, rows, note)]


async def _row(app: ASGIApp, sent: Sent, rounds: int) -> list[str]:
    gaps: list[float] = []
    statuses: set[int] = set()
    for _ in range(rounds):
        async with _timer() as timer:
            statuses.update(await asyncio.gather(*(sent.to(app) for _ in range(sent.times))))
        gaps.append(timer.longest_s * 1e3)
    ordered = sorted(gaps)
    size = len(sent.body) + len(sent.query) + len(sent.media_type)
    each = f"{ordered[0]:.1f} to {ordered[-1]:.1f}"
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
