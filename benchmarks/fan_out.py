"""Do two heads over one feature vector cost more than the slower of them?"""

from functools import partial

import numpy as np

from benchmarks.stage import Stage, stage
from benchmarks.table import Table
from benchmarks.timing import Call, Durations, interleaved, ratio

B_MS, C_MS = 80, 160
FLOATS = 384
MODEL_BY_NAME = {
    "A+B": "bench_b",
    "A+C": "bench_c",
    "A+R+B+C": "bench_routed",
    "A+B+C, shared": "bench_shared",
    "A+B+C, BLS": "bench_bls",
}
COLUMNS = ["", "through the gateway", "times the slower branch", "Triton itself", "times the slower branch"]
AIM = "Aim: at most 1.10 times the slower branch."
CORES = "Two heads need two free cores; the caller, the gateway and Triton share the machine's with them."


async def run(rounds: int) -> list[Table]:
    """Measures heads that wait, as for a GPU, and heads that compute, through the gateway and directly on Triton."""
    async with stage() as on:
        waiting = await _rows(on, rounds, is_busy=False)
        computing = await _rows(on, rounds, is_busy=True)
    heads = f"{B_MS} and {C_MS} ms"
    return [
        Table(f"Heads that wait {heads}, as for a GPU", COLUMNS, waiting, AIM),
        Table(f"Heads that compute for {heads} of one core", COLUMNS, computing, CORES),
    ]


async def _rows(on: Stage, rounds: int, *, is_busy: bool) -> list[list[str]]:
    work = {"b_ms": B_MS, "c_ms": C_MS, "is_busy": is_busy}
    count = {"FLOATS": np.array([FLOATS], np.int32)}
    cases: dict[str, Call] = {}
    for name, model in MODEL_BY_NAME.items():
        cases[f"gateway {name}"] = partial(on.gateway.post, model, floats=FLOATS, **work)
        cases[f"triton {name}"] = partial(on.triton.infer, model, count, **work)
    found = await interleaved(cases, rounds)
    return [_row(name, found) for name in MODEL_BY_NAME]


def _row(name: str, found: dict[str, Durations]) -> list[str]:
    cells = [name]
    for target in ("gateway", "triton"):
        branches = (found[f"{target} A+B"], found[f"{target} A+C"])
        slower = max(branches, key=lambda branch: branch.median_ms)
        cells += [str(found[f"{target} {name}"]), ratio(found[f"{target} {name}"], slower)]
    return cells
