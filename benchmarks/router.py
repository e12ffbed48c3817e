"""How much does a router between feature extractor and heads cost, compared with one tensor that the heads share?"""

from functools import partial

import numpy as np

from benchmarks.stage import Stage, stage
from benchmarks.table import Table
from benchmarks.timing import Call, interleaved, ratio, together

FLOATS_BY_SIZE = {"4 KB": 1024, "1 MB": 262_144, "16 MB": 4_194_304}
WAYS = {"router": "bench_routed", "shared": "bench_shared", "BLS": "bench_bls"}
CONCURRENT = 16


async def run(rounds: int) -> list[Table]:
    """Measures the latency of sequential calls, and the throughput of 16 simultaneous calls."""
    async with stage() as on:
        return [await _latency(on, rounds), await _throughput(on, max(3, rounds // 5))]


async def _latency(on: Stage, rounds: int) -> Table:
    rows = []
    for size, floats in FLOATS_BY_SIZE.items():
        cases: dict[str, Call] = {}
        for way, model in WAYS.items():
            cases[f"triton {way}"] = _direct(on, model, floats)
            cases[f"gateway {way}"] = partial(on.gateway.post, model, floats=floats)
        found = await interleaved(cases, 2 * rounds)
        for target in ("triton", "gateway"):
            router, shared, bls = (found[f"{target} {way}"] for way in WAYS)
            rows.append([size, target, str(router), str(shared), ratio(router, shared), str(bls), ratio(bls, shared)])
    columns = ["features", "called", "router", "shared", "router / shared", "BLS, heads together", "BLS / shared"]
    return Table("One call after the other", columns, rows, "Heads that only read the first and the last value.")


async def _throughput(on: Stage, rounds: int) -> Table:
    rows = []
    for size, floats in FLOATS_BY_SIZE.items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, model in WAYS.items():
                _, per_s = await together([_direct(on, model, floats)] * CONCURRENT)
                found[way].append(per_s)
        rows.append(
            [size, *(f"{np.median(values):.0f} ({min(values):.0f}-{max(values):.0f})" for values in found.values())]
        )
    return Table(f"{CONCURRENT} calls at once on Triton itself, answers a second", ["features", *WAYS], rows)


def _direct(on: Stage, model: str, floats: int) -> Call:
    return partial(on.triton.infer, model, {"FLOATS": np.array([floats], np.int32)})
