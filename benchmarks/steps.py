"""`python -m benchmarks steps`: the same models in a row as an ensemble, as a BLS script, and as steps."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.compare import P50, Comparison, Goal, Sample, Workload, ratio
from benchmarks.load.orders import HttpAsk
from benchmarks.servers import HERE, MIB, Start, running_gateway
from tests.toolkit.broken_repositories import Repository, parameter

ENSEMBLE, SCRIPT, STEPS = "ensemble", "BLS script", "steps"
SMALL, MEDIUM, LARGE = "16 bytes", "1 MiB", "16 MiB"
SIZES = {SMALL: 16, MEDIUM: MIB, LARGE: 16 * MIB}
LENGTHS = (2, 3)
CHAINS = {f"{length} models, {title}": (length, size) for length in LENGTHS for title, size in SIZES.items()}
CROPS = {f"{count} crops": count for count in (0, 1, 8, 64)}
ONE, TWO = (f"instance_group {{ kind: KIND_CPU count: {count} }}" for count in (1, 2))
BATCHES = "dynamic_batching { }"
GIVEN, FIRST, CROP = "INPUT:UINT8", "FIRST:UINT8:1", "UINT8:{}3,64,64"


def repository(folder: Path) -> Path:
    """Scripts have two instances and batches, as those of the reference pipelines have."""
    models = Repository(folder)
    for size in SIZES.values():
        for place in range(max(LENGTHS)):
            outputs = f"{FIRST} OUTPUT:UINT8:{size}"
            models.model(f"pass_{size}_{place}", GIVEN, outputs, ONE, batch=8, script=_script("bench_pass"))
        for length in LENGTHS:
            called = _models(length, size)
            names = ["INPUT", *called[:-1], "FIRST"]
            outputs = [*["OUTPUT"] * (length - 1), "FIRST"]
            steps = map("{} INPUT={} > {}={}".format, called, names, outputs, names[1:])
            models.ensemble(f"ensemble_{length}_{size}", GIVEN, FIRST, *steps, batch=8)
            rest, script = f"{TWO} {BATCHES} {parameter('bls_calls', ', '.join(called))}", _script("bench_script")
            models.model(f"script_{length}_{size}", GIVEN, FIRST, rest, batch=8, script=script)
    crops, labels = f"CROPS:{CROP.format('-1,')}", "LABELS:INT32:-1,1"
    models.model("detect", "COUNT:INT32:1", crops, ONE, script=_script("bench_detect"))
    crop = f"CROP:{CROP.format('')}"
    models.model("classify", crop, "LABEL:INT32:1", f"{ONE} {BATCHES}", batch=16, script=_script("bench_classify"))
    rest = f"{TWO} {parameter('bls_calls', 'detect, classify')}"
    models.model("products", "COUNT:INT32:1", labels, rest, script=_script("bench_products"))
    return folder


def _models(length: int, size: int) -> list[str]:
    return [f"pass_{size}_{place}" for place in range(length)]


def _script(name: str) -> str:
    return (HERE / "models" / name / "1" / "model.py").read_text()


def pipelines(kind: str) -> str:
    found: dict[str, object] = {}
    for length, size in CHAINS.values():
        given = {"inputs": {"file": {"tensor": "INPUT", "kind": "binary"}}}
        sources = ["INPUT", *(f"s{place}.OUTPUT" for place in range(length - 1))]
        steps = {
            f"s{place}": {"model": model, "inputs": {"INPUT": sources[place]}}
            for place, model in enumerate(_models(length, size))
        }
        of_steps = {"steps": steps, "outputs": {"first": {"tensor": f"s{length - 1}.FIRST"}}}
        model = {"model": f"{kind.rsplit(maxsplit=1)[-1]}_{length}_{size}"}
        found[f"chain_{length}_{size}"] = given | (of_steps if kind == STEPS else model)
    if kind == SCRIPT:
        found["products"] = {"model": "products"}
    elif kind == STEPS:
        steps = {
            "detect": {"model": "detect", "inputs": {"COUNT": "COUNT"}},
            "classify": {"model": "classify", "each": "detect.CROPS", "inputs": {"CROP": "detect.CROPS"}},
        }
        found["products"] = {"steps": steps, "outputs": {"LABELS": {"tensor": "classify.LABEL"}}}
    return json.dumps({"pipelines": found})


def asks(kind: str) -> Iterator[tuple[str, HttpAsk]]:
    for title, (length, size) in CHAINS.items():
        yield title, HttpAsk(f"/v1/pipelines/chain_{length}_{size}", b"7" * size, "application/octet-stream")
    for title, count in CROPS.items() if kind != ENSEMBLE else ():
        yield title, HttpAsk("/v1/pipelines/products", json.dumps({"COUNT": [count]}).encode())


def all_us(sample: Sample) -> float:
    return sample.peer_us + sample.triton_us


WORKLOADS = {
    each: [Workload(f"{each}, {text}", each, count) for count, text in ((1, "1 connection"), (16, "16 connections"))]
    for each in (*CHAINS, *CROPS)
}
ALL = [*chain.from_iterable(WORKLOADS.values())]
BESIDE_ENSEMBLE = {f"3 models, {SMALL}": 1.8, f"2 models, {LARGE}": 1.1, f"3 models, {LARGE}": 1.1}
GOALS = (
    *(
        Goal(f"{title} / BLS script", 1, 0.5, ratio(each, STEPS, SCRIPT, value), lower=True, case=each.title)
        for each in ALL
        for title, value in (("p50: steps", P50), ("CPU of gateway and Triton: steps", all_us))
    ),
    *(
        Goal("p50: steps / ensemble", most, None, ratio(each, STEPS, ENSEMBLE, P50), lower=True, case=each.title)
        for name, most in BESIDE_ENSEMBLE.items()
        for each in WORKLOADS[name]
    ),
)
NOTE = (
    "Each kind has its own gateway, with 1 GiB of shared memory, before the same Triton. The Python models of a chain "
    "return their input, a raw body; the answer is one number. Crops have 12 KiB, in calls of 16. Goals: at most the "
    "script's figures (aim: half of them), 1.8 times the ensemble's with 16 bytes, 1.1 times with 16 MiB."
)
SETTINGS = {
    "max_body_bytes": str(32 * MIB),
    "max_bytes_in_flight": str(1024 * MIB),
    "shared_memory_bytes": str(1024 * MIB),
}
PEERS: dict[str, Start] = {
    kind: partial(running_gateway, kind, asks=dict(asks(kind)), config=pipelines(kind), **SETTINGS)
    for kind in (ENSEMBLE, SCRIPT, STEPS)
}
COMPARISON = Comparison(PEERS, ALL, GOALS, note=NOTE, first_warm_up_s=0.3, models=repository)
run = COMPARISON.run
