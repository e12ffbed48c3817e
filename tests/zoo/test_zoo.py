"""Every kind of model of the table, in every dialect, compared with Triton's own gRPC.

The short form sends a few requests for each kind to two gateways that differ in their client, shared memory and
workers. JSON of large tensors and requests that share calls go to the first of them only, and large tensors to a third
gateway. The long form (`make test-full`) sends many to all combinations of the three.
`ZOO_SEED=7 pytest tests/zoo` repeats a run.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random

import httpx
import numpy as np
import pytest
from _pytest.mark import ParameterSet

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.conftest import running_gateway, running_triton
from tests.live.side_by_side import with_binary
from tests.toolkit.redis import RedisServer
from tests.zoo.cases import Case, DirectTriton, Tensor, Truth, random_case
from tests.zoo.dialects import Dialect, completion, dialects_of, oip_binary, oip_request, pipeline
from tests.zoo.expected import body_of
from tests.zoo.kinds import BY_NAME, KINDS, Kind
from tests.zoo.repository import BATCHED, SEQUENCES, write_gateway_yaml, write_repository

SEED = int(os.environ.get("ZOO_SEED", time.time_ns() % 1_000_000))
AT_ONCE = 8
CACHE = "--cache-config=local,size=8388608"


@dataclass(frozen=True)
class GatewayOptions:
    """How a gateway of the tests runs."""

    client: str
    shared_memory: bool
    workers: int

    def __str__(self) -> str:
        return f"{self.client}{' with shared memory' if self.shared_memory else ''}, {self.workers} worker(s)"


ALL = [GatewayOptions(*each) for each in product(("asyncio", "grpcio"), (True, False), (1, 2))]
SHORT = [GatewayOptions("asyncio", True, 2), GatewayOptions("grpcio", False, 1)]
WIRE = GatewayOptions("asyncio", False, 1)
"""Only large tensors take another way through this gateway than through those of the short form."""


def options_with(*short: GatewayOptions) -> list[ParameterSet]:
    return [pytest.param(each, id=str(each), marks=() if each in short else pytest.mark.full) for each in ALL]


FIRST = pytest.mark.parametrize("gateway", options_with(SHORT[0]), indirect=True)
"""The short form asks only the first gateway."""
COUNTS = pytest.mark.parametrize("count", [2, pytest.param(10, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """A Triton with a model of each kind."""
    folder = tmp_path_factory.mktemp("zoo")
    write_repository(folder)
    caches = next(models_venv.glob("lib/python3*/site-packages/pytriton/tritonserver/caches"))
    options = EmbeddedOptions(folder, models_venv, arguments=(CACHE, f"--cache-directory={caches}"))
    with running_triton(options) as triton:
        yield triton


@pytest.fixture(scope="module")
def direct(zoo: EmbeddedTriton) -> Iterator[DirectTriton]:
    triton = DirectTriton(zoo.grpc_url)
    yield triton
    triton.close()


@pytest.fixture(scope="module", params=options_with(*SHORT))
def gateway(
    request: pytest.FixtureRequest, zoo: EmbeddedTriton, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    with running(request.param, zoo, redis, tmp_path_factory.mktemp("gateway")) as client:
        yield client


@pytest.fixture(scope="module")
def wire(zoo: EmbeddedTriton, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running(WIRE, zoo, redis, tmp_path_factory.mktemp("wire")) as client:
        yield client


@contextmanager
def running(options: GatewayOptions, zoo: EmbeddedTriton, redis: RedisServer, folder: Path) -> Iterator[httpx.Client]:
    """A client of a gateway with these options."""
    write_gateway_yaml(folder / "gateway.yaml")
    settings = {
        "triton_url": zoo.grpc_url,
        "config": str(folder / "gateway.yaml"),
        "grpc": options.client,
        "workers": str(options.workers),
        "shared_memory_bytes": str(256 * 2**20 if options.shared_memory else 0),
        "max_body_bytes": str(64 * 2**20),
        "max_bytes_in_flight": str(1024 * 2**20),
        "timeout_s": "60",
        **({"redis_url": redis.url} if options.workers > 1 else {}),
    }
    with running_gateway(folder, **settings) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


def of_kinds(*, with_large_json: bool) -> pytest.MarkDecorator:
    kinds = [kind for kind in KINDS if (kind.is_large and not kind.heavy) is with_large_json]
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, id=kind.name, marks=[pytest.mark.full] * kind.is_long) for kind in kinds]
    )


@COUNTS
@of_kinds(with_large_json=False)
def test_every_dialect_answers_as_triton(gateway: httpx.Client, direct: DirectTriton, kind: Kind, count: int) -> None:
    compare_count(gateway, direct, kind, count)


@FIRST
@COUNTS
@of_kinds(with_large_json=True)
def test_every_dialect_answers_with_large_tensors(
    gateway: httpx.Client, direct: DirectTriton, kind: Kind, count: int
) -> None:
    compare_count(gateway, direct, kind, count)


def compare_count(gateway: httpx.Client, direct: DirectTriton, kind: Kind, count: int) -> None:
    """JSON of heavy kinds, and of many rows of large ones, is for the long form."""
    is_long = count > 2
    if kind.heavy:
        count = 2 if is_long else AT_ONCE
    if kind.is_long:
        count = 1
    compare(gateway, direct, kind, count, is_long=is_long)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.heavy or kind.name == "blobs"], ids=lambda kind: kind.name
)
def test_large_tensors_without_shared_memory(wire: httpx.Client, direct: DirectTriton, kind: Kind) -> None:
    compare(wire, direct, kind, AT_ONCE if kind.heavy else 2, is_long=False)


def compare(gateway: httpx.Client, direct: DirectTriton, kind: Kind, count: int, *, is_long: bool) -> None:
    """Sends this number of requests in every dialect. All calls of a kind run beside each other."""
    requests = [(number, *asked(direct, kind, number, is_long=is_long)) for number in range(count)]
    calls = [
        (number, case, truth, dialect)
        for number, case, truth in requests
        for dialect in dialects_of(case, heavy=is_long)
    ]

    def check(call: tuple[int, Case, Truth, Dialect]) -> None:
        number, case, truth, dialect = call
        try:
            dialect(gateway, case, truth, Random(f"{SEED} {kind.name} {number} {dialect.__name__}"))
        except Exception as exc:
            exc.add_note(f"ZOO_SEED={SEED}, {kind.name}, case {number}, dialect {dialect.__name__}: {case.inputs}")
            raise

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(check, calls))


@lru_cache(maxsize=1024)
def asked(direct: DirectTriton, kind: Kind, number: int, *, is_long: bool) -> tuple[Case, Truth]:
    """A request of the run, and the answer of Triton, which is asked once for all gateways.

    Every second request of a model with batches has a single item.
    """
    several = 2 if kind.heavy or (kind.is_large and not is_long) else None
    case = random_case(kind, Random(f"{SEED} {kind.name} {number}"), rows=(1, several)[number % 2])
    return case, direct.answer(case)


@FIRST
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.sample], ids=lambda kind: kind.name)
def test_requests_that_may_share_calls_get_their_own_rows(
    gateway: httpx.Client, direct: DirectTriton, kind: Kind
) -> None:
    """Many small requests at once, with one or two items."""

    def check(number: int) -> None:
        random = Random(f"{SEED} {kind.name} {number}")
        case = random_case(kind, random, rows=1 + number % 2)
        (oip_binary if number % 4 else pipeline)(gateway, case, direct.answer(case), random)

    with ThreadPoolExecutor(4 * AT_ONCE) as threads:
        list(threads.map(check, range(16 * AT_ONCE)))


def test_the_trial_names_the_output_that_is_not_cut_into_rows(gateway: httpx.Client) -> None:
    findings = [each for each in gateway.get("/v1/findings").json()["findings"] if each["code"] == "coalescing"]
    assert {each["pipeline"]: each["tensor"] for each in findings} == {
        each.name: each.fault for each in KINDS if each.fault
    }


def test_the_vllm_backend_answers_completions(gateway: httpx.Client, direct: DirectTriton) -> None:
    """OpenAI's clients send no input but the prompt."""
    random = Random(f"{SEED} completions")
    whole = random_case(BY_NAME["vllm"], random)
    case = replace(whole, inputs={"text_input": whole.inputs["text_input"]})
    completion(gateway, case, direct.answer(case), random)


def test_a_batch_without_rows_is_refused_as_in_triton(gateway: httpx.Client, direct: DirectTriton) -> None:
    for kind in (kind for kind in KINDS if kind.batch):
        case = random_case(kind, Random(f"{SEED} {kind.name}"), rows=1)
        inputs = {name: Tensor(tensor.datatype, tensor.array[:0]) for name, tensor in case.inputs.items()}
        case = replace(case, inputs=inputs)
        assert direct.answer(case).error is not None, kind.name
        body, headers = oip_request(case, binary_inputs=True, binary_outputs=True)
        answer = gateway.post(f"/v2/models/{kind.name}/infer", content=body, headers=headers)
        expected = {"error": f"inference request batch-size must be >= 1 for '{kind.name}'"}
        assert (answer.status_code, answer.json()) == (400, expected)
        answer = gateway.post(f"/v1/pipelines/{kind.name}{BATCHED}", json=body_of(case, batch=True))
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "batch"), kind.name


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_have_the_state_that_they_have_in_triton(gateway: httpx.Client, name: str) -> None:
    """Interleaved sequences: each answer is the sum of the values so far of its own sequence."""
    random = Random(f"{SEED} {name}")
    keys: list[int | str] = [random.getrandbits(31) | 1 for _ in range(6)]
    if SEQUENCES[name] == "STRING":
        keys = [f"{key:0>128}" for key in keys]  # Triton 2.51 passes other texts to Python models wrongly
    totals = dict.fromkeys(keys, np.zeros(3, np.int64))
    for step in range(5):
        for key in random.sample(keys, len(keys)):
            value = np.array([random.randint(-1000, 1000) for _ in range(3)], np.int64)
            totals[key] = totals[key] + value
            parameters = {"sequence_id": key, "sequence_start": step == 0, "sequence_end": step == 4}
            tensor = {"name": "VALUE", "datatype": "INT64", "shape": [1, 3], "data": value.tolist()}
            answer = gateway.post(f"/v2/models/{name}/infer", json={"inputs": [tensor], "parameters": parameters})
            assert answer.json()["outputs"][0]["data"] == totals[key].tolist(), (SEED, answer.text)


def test_classes_have_the_labels_of_the_model(gateway: httpx.Client, direct: DirectTriton) -> None:
    case = random_case(BY_NAME["resnet"], Random(f"{SEED} classes"))
    scores = direct.answer(case).responses[0]["SCORES"].array
    inputs = [{"name": "PIXELS", "datatype": "FP32", "shape": case.inputs["PIXELS"].shape}]
    inputs[0]["parameters"] = {"binary_data_size": len(case.inputs["PIXELS"].raw)}
    outputs = [{"name": "SCORES", "parameters": {"classification": 3}}]
    body, headers = with_binary({"inputs": inputs, "outputs": outputs}, case.inputs["PIXELS"].raw)
    found = gateway.post("/v2/models/resnet/infer", content=body, headers=headers).json()["outputs"][0]["data"]
    best = [max(row) for row in scores.tolist()]
    assert [float(text.split(":")[0]) for text in found[::3]] == best
    assert all(text.split(":")[2] == f"class {text.split(':')[1]}" for text in found)
