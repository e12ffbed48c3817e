"""Every kind of model of the table, in every dialect, compared with Triton's own gRPC.

The short form sends a few requests for each kind, the long form (`make test-full`) sends many. There are two gateways,
which differ in their client, shared memory and workers. JSON of large tensors and requests that share calls go to the
first of them only.
`ZOO_SEED=7 pytest tests/zoo` repeats a run.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from random import Random

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.docs.pages import ROOT
from tests.toolkit.processes import running_gateway, running_triton
from tests.toolkit.programs import RedisServer
from tests.zoo.cases import Case, DirectTriton, Truth, random_case
from tests.zoo.dialects import Dialect, dialects_of, oip_binary, pipeline
from tests.zoo.kinds import KINDS, Kind
from tests.zoo.page import table
from tests.zoo.repository import write_gateway_yaml, write_models

SEED = int(os.environ.get("ZOO_SEED", time.time_ns() % 1_000_000))
AT_ONCE = 8
CACHE = "--cache-config=local,size=8388608"


GATEWAYS = {
    "asyncio with shared memory, 2 workers": {"shared_memory_bytes": str(256 * 2**20), "workers": "2"},
    "grpcio": {"grpc": "grpcio"},
}
FIRST = next(iter(GATEWAYS))
ONLY_FIRST = pytest.mark.parametrize("gateway", [FIRST], indirect=True)
ASKED = [(name, kind) for name in GATEWAYS for kind in KINDS if name == FIRST or kind.heavy or not kind.is_large]
NAMES = [f"{name}-{kind.name}" for name, kind in ASKED]
COUNTS = pytest.mark.parametrize("count", [2, pytest.param(10, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """A Triton with a model of each kind."""
    folder = tmp_path_factory.mktemp("zoo")
    write_models(folder, KINDS)
    caches = next(models_venv.glob("lib/python3*/site-packages/pytriton/tritonserver/caches"))
    options = EmbeddedOptions(folder, models_venv, arguments=(CACHE, f"--cache-directory={caches}"))
    with running_triton(options) as triton:
        yield triton


@pytest.fixture(scope="module")
def direct(zoo: EmbeddedTriton) -> Iterator[DirectTriton]:
    triton = DirectTriton(zoo.grpc_url)
    yield triton
    triton.close()


@pytest.fixture(scope="module", params=GATEWAYS)
def gateway(
    request: pytest.FixtureRequest, zoo: EmbeddedTriton, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a gateway with these settings."""
    folder = tmp_path_factory.mktemp("gateway")
    write_gateway_yaml(folder / "gateway.yaml")
    settings = {
        "triton_url": zoo.grpc_url,
        "config": str(folder / "gateway.yaml"),
        "max_body_bytes": str(64 * 2**20),
        "max_bytes_in_flight": str(1024 * 2**20),
        "timeout_s": "60",
        **GATEWAYS[request.param],
        **({"redis_url": redis.url} if request.param == FIRST else {}),
    }
    with running_gateway(folder, **settings) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@COUNTS
@pytest.mark.parametrize(("gateway", "kind"), ASKED, ids=NAMES, indirect=["gateway"])
def test_every_dialect_answers_as_triton(gateway: httpx.Client, direct: DirectTriton, kind: Kind, count: int) -> None:
    """JSON of heavy kinds, and of many rows of large ones, is for the long form."""
    is_long = count > 2
    if kind.heavy:
        count = 2 if is_long else AT_ONCE
    compare(gateway, direct, kind, count, is_long=is_long)


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


@ONLY_FIRST
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


def test_the_page_has_the_table_of_the_kinds() -> None:
    assert table() in (ROOT / "docs/reference/models.md").read_text(), "`python -m tests.zoo.page` prints the table"
