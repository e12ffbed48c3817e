"""`python -m benchmarks load`: goodput above the capacity, refusals, health, and the effect of a key that floods.

The capacity is the rate of answers to a few callers that wait for each answer; the benchmark first searches for the
best number of callers. A load of n times the capacity sends requests at n times that rate, regardless of the answers;
or that many callers send one request per second each and obey ``Retry-After``.

The capacity of a machine drifts. So the capacity is measured again before each load, and each load runs several times.
Goodput is compared with the capacity in the same rounds.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.contents import json_of
from benchmarks.load.orders import Answers, Flood, HttpAsk, Obedient, Unary
from benchmarks.servers import ROOT, LoadProcess, running_gateway, running_triton
from benchmarks.spread import percentile
from benchmarks.table import Table
from tests.toolkit.keys import bearer, entry, write_keys

CALLERS = (1, 2, 4, 8)
"""Numbers of callers to try for the measurement of the capacity."""
PEAK_S = 6.0
ROUNDS = 3
"""Measurements of each load."""
WARM_UP_S = 4.0
FACTORS = {1: None, 4: 0.9, 16: 0.9, 64: 0.8}
"""Multiple of the capacity -> the required fraction of the peak, if one is required."""
CLOSED = 256
PROBE_S = 0.05
CREATIONS = 1000
KEY = tuple(bearer("flood").items())
IMAGE = HttpAsk("/v1/pipelines/ocr", (ROOT / "samples/sign.png").read_bytes(), "image/png", KEY)
START = HttpAsk(
    "/v1/streams", json_of(pipeline="write", inputs={"prompt": "The for statement", "max_tokens": 64}), headers=KEY
)


@dataclass(frozen=True)
class Scene:
    """``client``: of this process, with the other key."""

    load: LoadProcess
    url: str
    client: httpx.AsyncClient
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One measurement of a load. ``health_s``: the durations of ``/health/live`` during the load."""

    answers: Answers
    health_s: Sequence[float]
    peak: float = 0.0
    """Answers per second with few callers, measured before the load; 0 if not measured."""


@dataclass(frozen=True)
class Load:
    """``required``: fraction of the peak. ``samples``: all measurements."""

    name: str
    order: Flood | Obedient
    required: float | None = None
    samples: list[Sample] = field(default_factory=list)


async def run(rounds: int) -> list[Table]:
    """``rounds``: seconds of each measurement."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as path:
        async with _scene(Path(path), rounds) as scene:
            peak, callers = await _best_callers(scene)
            loads = await _loads(scene, peak, callers)
            closed = await _closed(scene, peak)
            keys = await _two_keys(scene, peak)
            creations = await _creations(scene)
    return [_goodput([*loads, closed]), keys, creations]


@asynccontextmanager
async def _scene(folder: Path, seconds: float) -> AsyncIterator[Scene]:
    keys = write_keys(folder / "keys.yaml", entry("flood"), entry("other"))
    more = {name.removeprefix("GATEWAY_").lower(): each for name, each in os.environ.items() if name[:8] == "GATEWAY_"}
    with running_triton(folder) as triton:
        async with (
            running_gateway(
                "loaded", triton, folder, {}, api_keys_file=str(keys), **{"log_level": "warning", **more}
            ) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60, headers=bearer("other")) as client,
        ):
            yield Scene(gateway.load, gateway.url, client, seconds)


async def _best_callers(scene: Scene) -> tuple[float, int]:
    """Finds the highest rate of answers per second, and its number of callers."""
    return max([(await _peak(scene, callers), callers) for callers in CALLERS])


async def _peak(scene: Scene, callers: int) -> float:
    """Answers per second."""
    report = await scene.load.perform(Unary((IMAGE,) * callers, PEAK_S))
    return report.count / report.elapsed_s


async def _loads(scene: Scene, peak: float, callers: int) -> list[Load]:
    """Runs each load once per round, after a measurement of the peak."""
    floods = [
        Load(f"{each} times, `Retry-After` ignored", Flood(IMAGE, each * peak, WARM_UP_S, scene.seconds), required)
        for each, required in FACTORS.items()
    ]
    obedient = [
        Load(
            f"{each} times, `Retry-After` obeyed",
            Obedient(IMAGE, round(each * peak), 1.0, WARM_UP_S, scene.seconds),
            required,
        )
        for each, required in FACTORS.items()
    ]
    for _ in range(ROUNDS):
        for load in (*floods, *obedient):
            load.samples.append(replace(await _measured(scene, load.order), peak=await _peak(scene, callers)))
    return [*floods, *obedient]


async def _closed(scene: Scene, peak: float) -> Load:
    """Runs callers that send the next request as soon as the last one is answered or refused."""
    order = Obedient(IMAGE, CLOSED, 0.0, WARM_UP_S, scene.seconds, obeys=False)
    measured = replace(await _measured(scene, order), peak=peak)
    return Load(f"{CLOSED} callers that retry at once", order, samples=[measured])


async def _measured(scene: Scene, order: Flood | Obedient) -> Sample:
    health_s: list[float] = []
    probing = asyncio.create_task(_probe(scene, health_s))
    answers = await scene.load.perform(order)
    probing.cancel()
    await asyncio.sleep(2.0)  # until the queue is empty
    return Sample(answers, health_s)


async def _probe(scene: Scene, found_s: list[float]) -> None:
    """Calls ``/health/live`` over one connection."""
    address = urlsplit(scene.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
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
    """Floods the gateway with one key at 16 times the capacity, while another key sends one request at a time."""
    alone = await _other(scene)
    flooding = asyncio.create_task(scene.load.perform(Flood(IMAGE, 16 * peak, WARM_UP_S, scene.seconds)))
    await asyncio.sleep(WARM_UP_S)
    beside = await _other(scene)
    answers = await flooding
    rows = [
        ["the other key alone", *_latency(alone), ""],
        ["the other key, during the flood", *_latency(beside), ""],
        ["the key that floods", *_latency(answers), f"{answers.statuses.get(429, 0):,}"],
    ]
    note = "One key sends 16 times the capacity of `ocr`, the other sends one request at a time. Same priority."
    return Table("Two keys", ["", "answers", "median, ms", "p99, ms", "not answered 200"], rows, note)


async def _other(scene: Scene) -> Answers:
    """Runs in this process, because the load process sends the flood."""
    found, ends = Answers(scene.seconds), time.perf_counter() + scene.seconds - 1
    while time.perf_counter() < ends:
        started = time.perf_counter()
        answer = await scene.client.post(IMAGE.path, content=IMAGE.body, headers={"Content-Type": IMAGE.content_type})
        found.add(answer.status_code, time.perf_counter() - started)
    return found


async def _creations(scene: Scene) -> Table:
    """Starts 1,000 streams as fast as possible with one key, while another key requests a few words."""
    begun = time.perf_counter()
    flooding = asyncio.create_task(scene.load.perform(Flood(START, CREATIONS / 10, 0.0, 10.0)))
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
    return Table("A thousand streams", columns, [cells], note)


async def _words(scene: Scene) -> float:
    started = time.perf_counter()
    answer = await scene.client.post("/v1/pipelines/write", json={"prompt": "The for statement", "max_tokens": 8})
    answer.raise_for_status()
    return time.perf_counter() - started


def _goodput(loads: Sequence[Load]) -> Table:
    columns = ["load", "asked/s", "200/s", "of the peak", "429 median, ms", "other answers"]
    columns += ["/health/live p99, ms", "200 median, s"]
    note = (
        "`ocr` with an image of 9 KB. Goodput is the rate of answers with status 200 before the deadline of 10 s. "
        "The peak is the goodput of a few callers that wait for each answer, measured between the loads. "
        f"Each load is measured {ROUNDS} times. Rates are medians, with the lowest and the highest in brackets; "
        "times are of all measurements together. If a part of the peak is required, so are at most 10 ms for 429 and "
        "50 ms for `/health/live`."
    )
    return Table("Goodput above the capacity", columns, [_row(load) for load in loads], note)


def _row(load: Load) -> list[str]:
    answers = [sample.answers for sample in load.samples]
    asked = statistics.median(each.asked / each.seconds for each in answers)
    statuses = sum((Counter(each.statuses) for each in answers), Counter[int]())
    others = {status: count for status, count in statuses.items() if status not in (200, 429)}
    refused_s = [took_s for each in answers for took_s in each.refused_s]
    good_s = [took_s for each in answers for took_s in each.good_s]
    refused_ms = 1000 * statistics.median(refused_s) if refused_s else 0.0
    health_ms = 1000 * percentile([took_s for sample in load.samples for took_s in sample.health_s], 99)
    rates = [len(each.good_s) / each.seconds for each in answers]
    peaks = [sample.peak for sample in load.samples]
    required, part = load.required, statistics.median(rates) / statistics.median(peaks)
    of_peak = f"{100 * part:.0f} % of {statistics.median(peaks):.1f}"
    if required is not None:
        missed = part < required or refused_ms > 10 or health_ms > 50
        of_peak += f" (required: {100 * required:.0f} %){' **missed**' * missed}"
    return [
        load.name,
        f"{asked:,.0f}",
        _range(rates),
        of_peak,
        f"{refused_ms:.1f}" if refused_s else "-",
        ", ".join(f"{count} x {status}" for status, count in sorted(others.items())) or "none",
        f"{health_ms:.1f}",
        f"{statistics.median(good_s):.2f}" if good_s else "-",
    ]


def _range(rates: Sequence[float]) -> str:
    """Formats the median, the lowest and the highest value."""
    if len(rates) == 1:
        return f"{rates[0]:.1f}"
    return f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})"


def _latency(answers: Answers) -> list[str]:
    if not answers.good_s:
        return ["0", "-", "-"]
    median, last = (1000 * percentile(answers.good_s, part) for part in (50, 99))
    return [str(len(answers.good_s)), f"{median:,.0f}", f"{last:,.0f}"]
