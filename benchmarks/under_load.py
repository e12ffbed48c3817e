"""`python -m benchmarks load`: goodput above the capacity, refusals, health, and a key beside one that floods.

The capacity is the highest rate of answers that is measured with few callers who wait for each answer. n times the
capacity is n times that rate, asked at a steady pace whatever comes back; or that many callers who ask once a second
each and obey ``Retry-After``.
"""

import asyncio
import hashlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.load.orders import Answers, Flood, HttpAsk, Obedient, Unary
from benchmarks.load.process import LoadProcess, load_process
from benchmarks.peers.contents import json_of
from benchmarks.stage import ROOT, Gateway, running_gateway, running_triton
from benchmarks.table import Table
from benchmarks.timing import percentile

CALLERS = (1, 2, 4, 8)
"""Of the measurements of the capacity."""
PEAK_S = 6.0
WARM_UP_S = 4.0
FACTORS = {1: 0.9, 4: 0.9, 16: 0.9, 64: 0.8}
"""Times the capacity -> the part of the peak that is required."""
CLOSED = 256
PROBE_S = 0.05
CREATIONS = 1000
IMAGE = HttpAsk("/v1/pipelines/ocr", (ROOT / "samples/sign.png").read_bytes(), "image/png")
WRITE = json_of(prompt="The for statement", max_tokens=8)
START = HttpAsk("/v1/streams", json_of(pipeline="write", inputs={"prompt": "The for statement", "max_tokens": 64}))


@dataclass(frozen=True)
class Keys:
    """The texts of two keys, and the file that has both."""

    flood: str
    other: str
    file: Path

    @classmethod
    def write(cls, folder: Path) -> "Keys":
        texts = [f"tgk_{secrets.token_urlsafe(32)}" for _ in range(2)]
        lines = [
            f"  - {{id: {name}, sha256: {hashlib.sha256(text.encode()).hexdigest()}}}"
            for name, text in zip(("flood", "other"), texts, strict=True)
        ]
        path = folder / "keys.yaml"
        path.write_text("\n".join(["keys:", *lines, ""]))
        return cls(*texts, path)


@dataclass(frozen=True)
class Scene:
    gateway: Gateway
    load: LoadProcess
    keys: Keys
    seconds: float

    def ask(self, key: str = "", ask: HttpAsk = IMAGE) -> HttpAsk:
        return replace(ask, headers=(*ask.headers, ("X-API-Key", key or self.keys.flood)))


@dataclass(frozen=True)
class Sample:
    """What one load found, and how late ``/health/live`` was meanwhile."""

    name: str
    answers: Answers
    health_s: Sequence[float]


async def run(rounds: int) -> list[Table]:
    """``rounds``: seconds of each measurement."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as path:
        async with _scene(Path(path), rounds) as scene:
            peak = await _peak(scene)
            ignoring = [await _ignored(scene, factor, peak) for factor in FACTORS]
            obeying = [await _obeyed(scene, factor, peak) for factor in FACTORS]
            closed = await _closed(scene)
            keys = await _two_keys(scene, peak)
            creations = await _creations(scene)
    return [_goodput(peak, ignoring, obeying, closed), keys, creations]


@asynccontextmanager
async def _scene(folder: Path, seconds: float) -> AsyncIterator[Scene]:
    keys = Keys.write(folder)
    more = {"GATEWAY_API_KEYS_FILE": str(keys.file), **_settings()}
    async with running_triton(folder) as triton, running_gateway(folder, triton, more=more) as gateway:
        address = gateway.url.removeprefix("http://").rstrip("/")
        async with load_process("http", address, folder) as load:
            yield Scene(gateway, load, keys, seconds)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("GATEWAY_")}


async def _peak(scene: Scene) -> float:
    """Answers per second."""
    rates = []
    for callers in CALLERS:
        report = await scene.load.perform(Unary(scene.ask(), callers, PEAK_S))
        rates.append(report.count / report.elapsed_s)
    return max(rates)


async def _ignored(scene: Scene, factor: int, peak: float) -> Sample:
    order = Flood(scene.ask(), factor * peak, WARM_UP_S, scene.seconds)
    return await _measured(scene, f"{factor} times, `Retry-After` ignored", order)


async def _obeyed(scene: Scene, factor: int, peak: float) -> Sample:
    order = Obedient(scene.ask(), round(factor * peak), 1.0, WARM_UP_S, scene.seconds)
    return await _measured(scene, f"{factor} times, `Retry-After` obeyed", order)


async def _closed(scene: Scene) -> Sample:
    """Callers who ask again at once, whatever comes back."""
    return await _measured(
        scene,
        f"{CLOSED} callers who ask again at once",
        Obedient(scene.ask(), CLOSED, 0.0, WARM_UP_S, scene.seconds, obeys=False),
    )


async def _measured(scene: Scene, name: str, order: Flood | Obedient) -> Sample:
    health_s: list[float] = []
    probing = asyncio.create_task(_probe(scene, health_s))
    answers = await scene.load.perform(order)
    probing.cancel()
    await asyncio.sleep(2.0)  # the queue empties
    return Sample(name, answers, health_s)


async def _probe(scene: Scene, found_s: list[float]) -> None:
    """Asks ``/health/live`` over one connection."""
    host, port = scene.gateway.url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    await asyncio.sleep(WARM_UP_S)
    while True:
        started = time.perf_counter()
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            await reader.readuntil(b"}")
        finally:
            found_s.append(time.perf_counter() - started)
        await asyncio.sleep(PROBE_S)


async def _two_keys(scene: Scene, peak: float) -> Table:
    """One key asks 16 times the capacity; the other asks one request after the other."""
    alone = await _other(scene)
    flooding = asyncio.create_task(scene.load.perform(Flood(scene.ask(), 16 * peak, WARM_UP_S, scene.seconds)))
    await asyncio.sleep(WARM_UP_S)
    beside = await _other(scene)
    answers = await flooding
    rows = [
        ["the other key alone", *_latency(alone), ""],
        ["the other key, beside the flood", *_latency(beside), ""],
        ["the key that floods", *_latency(answers), f"{answers.statuses.get(429, 0):,}"],
    ]
    note = "One key asks 16 times the capacity of `ocr`, the other one request after the other. Same priority."
    return Table("Two keys", ["", "answers", "median, ms", "p99, ms", "not answered 200"], rows, note)


async def _other(scene: Scene) -> Answers:
    """In this process, so that the load process stays free for the flood."""
    found_s, ends, failed = list[float](), time.perf_counter() + scene.seconds - 1, 0
    headers = {"X-API-Key": scene.keys.other, "Content-Type": IMAGE.content_type}
    while time.perf_counter() < ends:
        started = time.perf_counter()
        answer = await scene.gateway.client.post(IMAGE.path, content=IMAGE.body, headers=headers)
        if answer.status_code == 200:
            found_s.append(time.perf_counter() - started)
        else:
            failed += 1
    return Answers(len(found_s), scene.seconds, {429: failed}, tuple(found_s), ())


async def _creations(scene: Scene) -> Table:
    """1,000 streams started as fast as possible by one key, while the other one wants a few words."""
    begun = time.perf_counter()
    flooding = asyncio.create_task(scene.load.perform(Flood(scene.ask(ask=START), CREATIONS / 10, 0.0, 10.0)))
    await asyncio.sleep(1.0)
    waits_s = [await _words(scene) for _ in range(5)]
    answers = await flooding
    usable_s = await _words(scene)
    took_s = time.perf_counter() - begun
    cells = [
        f"{answers.statuses.get(201, 0):,}",
        f"{answers.statuses.get(429, 0):,}",
        f"{1000 * statistics.median(waits_s):,.0f}",
        f"{1000 * max(waits_s):,.0f}",
        f"{1000 * usable_s:,.0f}",
    ]
    note = (
        f"{CREATIONS:,} `POST /v1/streams` of 64 tokens in 10 s by one key; the other key asks `write` for 8 tokens. "
        f"{took_s:.0f} s in all."
    )
    columns = ["201", "429", "8 tokens meanwhile, ms: median", "longest", "afterwards"]
    return Table("Streams that are started by the thousand", columns, [cells], note)


async def _words(scene: Scene) -> float:
    started = time.perf_counter()
    headers = {"X-API-Key": scene.keys.other, "Content-Type": "application/json"}
    answer = await scene.gateway.client.post("/v1/pipelines/write", content=WRITE, headers=headers)
    answer.raise_for_status()
    return time.perf_counter() - started


def _goodput(peak: float, ignoring: Sequence[Sample], obeying: Sequence[Sample], closed: Sample) -> Table:
    rows = []
    for samples in (ignoring, obeying):
        rows += [_row(sample, peak, required) for sample, required in zip(samples, FACTORS.values(), strict=True)]
    columns = ["load", "asked/s", "200/s", "of the peak", "429 median, ms", "other answers"]
    columns += ["/health/live p99, ms", "200 median, s", ""]
    note = (
        f"`ocr` with an image of 9 KB. The peak: {peak:.1f} answers/s. "
        "Goodput is what is answered 200 before its deadline of 10 s."
    )
    return Table("Goodput above the capacity", columns, [*rows, _row(closed, peak, None)], note)


def _row(sample: Sample, peak: float, required: float | None) -> list[str]:
    answers = sample.answers
    rate = len(answers.good_s) / answers.seconds
    others = {status: count for status, count in answers.statuses.items() if status not in (200, 429)}
    refused_ms = 1000 * statistics.median(answers.refused_s) if answers.refused_s else 0.0
    health_ms = 1000 * percentile(sample.health_s, 99)
    missed = required is not None and (rate < required * peak or refused_ms > 10 or health_ms > 50)
    return [
        sample.name,
        f"{answers.asked / answers.seconds:,.0f}",
        f"{rate:.1f}",
        f"{100 * rate / peak:.0f} %" + (f" (required: {100 * required:.0f} %)" if required else ""),
        f"{refused_ms:.1f}" if answers.refused_s else "-",
        ", ".join(f"{count} x {status}" for status, count in sorted(others.items())) or "none",
        f"{health_ms:.1f}",
        f"{statistics.median(answers.good_s):.2f}" if answers.good_s else "-",
        "" if required is None else "**missed**" if missed else "reached",
    ]


def _latency(answers: Answers) -> list[str]:
    if not answers.good_s:
        return ["0", "-", "-"]
    median, last = (1000 * percentile(answers.good_s, part) for part in (50, 99))
    return [str(len(answers.good_s)), f"{median:,.0f}", f"{last:,.0f}"]
