"""`python -m benchmarks steps`: the same models in a row as an ensemble, as a BLS script, and as steps."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.compare import P50, Comparison, Goal, Sample, Workload, ratio
from benchmarks.load.orders import HttpAsk
from benchmarks.servers import HERE, MIB, Start, running_gateway

ENSEMBLE, SCRIPT, STEPS = "ensemble", "BLS script", "steps"
SMALL, MEDIUM, LARGE = "16 bytes", "1 MiB", "16 MiB"
SIZES = {SMALL: 16, MEDIUM: MIB, LARGE: 16 * MIB}
LENGTHS = (2, 3)
CHAINS = {f"{length} models, {title}": (length, size) for length in LENGTHS for title, size in SIZES.items()}
CROPS = {f"{count} crops": count for count in (0, 1, 8, 64)}
MODEL = 'name: "{}" {} max_batch_size: {}'
TENSOR = '{}put {{ name: "{}" data_type: TYPE_{} dims: {} }}'
PYTHON = 'backend: "python" instance_group {{ kind: KIND_CPU count: {} }}'
CALLS = 'parameters {{ key: "bls_calls" value {{ string_value: "{}" }} }}'
STEP = (
    '{{ model_name: "{}" model_version: -1 input_map {{ key: "INPUT" value: "{}" }} '
    'output_map {{ key: "{}" value: "{}" }} }}'
)
BATCHES = "dynamic_batching { }"
GIVEN, FIRST = ("in", "INPUT", "UINT8", [-1]), ("out", "FIRST", "UINT8", [1])
COUNT, CROP = ("in", "COUNT", "INT32", [1]), ("UINT8", [3, 64, 64])


def repository(folder: Path) -> Path:
    """Scripts have two instances and batches, as those of the reference pipelines have."""
    for size in SIZES.values():
        for place in range(max(LENGTHS)):
            tensors = GIVEN, FIRST, ("out", "OUTPUT", "UINT8", [size])
            _write(folder, f"pass_{size}_{place}", "bench_pass", [PYTHON.format(1)], 8, *tensors)
        for length in LENGTHS:
            models = _models(length, size)
            _write(folder, f"ensemble_{length}_{size}", "", [_scheduling(models)], 8, GIVEN, FIRST)
            head = [PYTHON.format(2), BATCHES, CALLS.format(", ".join(models))]
            _write(folder, f"script_{length}_{size}", "bench_script", head, 8, GIVEN, FIRST)
    crops, labels = ("out", "CROPS", CROP[0], [-1, *CROP[1]]), ("out", "LABELS", "INT32", [-1, 1])
    _write(folder, "detect", "bench_detect", [PYTHON.format(1)], 0, COUNT, crops)
    crop, label = ("in", "CROP", *CROP), ("out", "LABEL", "INT32", [1])
    _write(folder, "classify", "bench_classify", [PYTHON.format(1), BATCHES], 16, crop, label)
    head = [PYTHON.format(2), CALLS.format("detect, classify")]
    _write(folder, "products", "bench_products", head, 0, COUNT, labels)
    return folder


def _models(length: int, size: int) -> list[str]:
    return [f"pass_{size}_{place}" for place in range(length)]


def _write(folder: Path, name: str, code: str, head: list[str], batch: int, *tensors: tuple[object, ...]) -> None:
    (folder / name / "1").mkdir(parents=True)
    config = [MODEL.format(name, " ".join(head), batch), *(TENSOR.format(*each) for each in tensors)]
    (folder / name / "config.pbtxt").write_text("\n".join(config))
    if code:
        (folder / name / "1" / "model.py").symlink_to(HERE / "models" / code / "1" / "model.py")


def _scheduling(models: list[str]) -> str:
    names = ["INPUT", *models[:-1], "FIRST"]
    outputs = [*["OUTPUT"] * (len(models) - 1), "FIRST"]
    steps = map(STEP.format, models, names, outputs, names[1:])
    return f'platform: "ensemble" ensemble_scheduling {{ step [ {", ".join(steps)} ] }}'


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
