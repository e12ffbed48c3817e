"""Is the first BLS call after readiness as fast as later calls, and are many simultaneous calls all answered?"""

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.stage import Stage, Triton, running_triton, stage
from benchmarks.table import Table
from benchmarks.timing import Call, Durations, interleaved, timed, together

CALLS_AT_START = 4
STEADY_CALLS = 30
CONCURRENT = 64
HANGS_AFTER_S = 60.0
TEXT = "The striker scored twice, what a wonderful match!"
TOPICS = ["politics", "business", "sport", "technology", "science", "health", "travel", "food", "entertainment"]
SENTIMENTS = ["positive", "neutral", "negative"]


async def run(rounds: int) -> list[Table]:
    """Measures each first call on new servers, then 64 simultaneous calls on one stage."""
    starts = max(3, rounds // 5)
    tables = [await _first_calls(starts)]
    async with stage() as on:
        return [*tables, await _many_at_once(on, max(3, rounds // 3))]


async def _first_calls(starts: int) -> Table:
    rows = []
    for _ in range(starts):
        rows.append(
            [await _after_readiness("insights_bls"), await _after_readiness("insights"), await _without_gateway()]
        )
    names = (
        "insights_bls, through a gateway that is ready (it has run the sample)",
        "insights, the same as an ensemble, for comparison",
        "insights_bls, on Triton, nothing run before",
    )
    columns = ["", "first call", "slowest of the first 4", "steady", "first / steady", "slowest / steady"]
    note = (
        f"{starts} fresh starts of both for each line; steady: {STEADY_CALLS} later calls; ratios to the median of the "
        "same start's steady calls, their median and range. Aim: at most 1.5."
    )
    return Table(
        "The first call",
        columns,
        [_first_row(*pair) for pair in zip(names, zip(*rows, strict=True), strict=True)],
        note,
    )


async def _after_readiness(pipeline: str) -> Durations:
    async with stage() as on:
        return await _in_a_row(partial(on.gateway.post, pipeline, text=TEXT))


async def _without_gateway() -> Durations:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with running_triton(Path(folder)) as triton:
            await triton.infer("text_tokenize", {"PROMPT": np.array([b"opens the connection"], np.object_)})
            return await _in_a_row(_direct(triton))


async def _in_a_row(call: Call) -> Durations:
    return Durations(tuple([await timed(call) for _ in range(CALLS_AT_START + STEADY_CALLS)]))


def _first_row(name: str, runs: Sequence[Durations]) -> list[str]:
    first = Durations(tuple(each.seconds[0] for each in runs))
    slowest = Durations(tuple(max(each.seconds[:CALLS_AT_START]) for each in runs))
    steady = [Durations(each.seconds[CALLS_AT_START:]) for each in runs]
    every = Durations(tuple(second for each in steady for second in each.seconds))
    return [name, str(first), str(slowest), str(every), _ratios(first, steady), _ratios(slowest, steady)]


def _ratios(durations: Durations, steady: Sequence[Durations]) -> str:
    ratios = [1000 * second / each.median_ms for second, each in zip(durations.seconds, steady, strict=True)]
    return f"{np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


async def _many_at_once(on: Stage, rounds: int) -> Table:
    ways: dict[str, Call] = {
        f"{target} {name}": call
        for name in ("insights", "insights_direct", "insights_bls")
        for target, call in (
            ("gateway", partial(on.gateway.post, name, text=TEXT)),
            ("triton", _direct(on.triton, name)),
        )
    }
    alone = await interleaved(ways, 3 * rounds)
    found: dict[str, list[tuple[Durations, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            async with asyncio.timeout(HANGS_AFTER_S):
                found[name].append(await together([call] * CONCURRENT))
    rows = [_many_row(name, alone[name], found[name]) for name in ways]
    columns = ["called", "alone", f"{CONCURRENT} at once", "answers a second", "answered"]
    return Table(f"{CONCURRENT} calls at once, {rounds} times; a call that is not answered ends the run", columns, rows)


def _many_row(name: str, alone: Durations, runs: list[tuple[Durations, float]]) -> list[str]:
    every = Durations(tuple(second for durations, _ in runs for second in durations.seconds))
    per_s = np.median([rate for _, rate in runs])
    return [name, str(alone), str(every), f"{per_s:.0f}", f"{len(every.seconds)} of {CONCURRENT * len(runs)}"]


def _direct(triton: Triton, model: str = "insights_bls") -> Call:
    inputs = {"TEXT": [TEXT], "TOPICS": TOPICS, "SENTIMENTS": SENTIMENTS}
    arrays = {name: np.array([[each.encode() for each in texts]], np.object_) for name, texts in inputs.items()}
    return partial(triton.infer, model, arrays)
