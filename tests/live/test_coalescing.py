"""Requests share calls to a real Triton, with two workers; the answers prove whose they are."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.coalesced import BAD, KILLER, Answers, ask, rows_gateway, rows_triton
from tests.toolkit.processes import GatewayProcess, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows") / "models"


@pytest.fixture(scope="module")
def rows(repository: Path, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with rows_triton(repository, models_venv) as triton:
        yield triton


@pytest.fixture(scope="module")
def two_workers(rows: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with rows_gateway(rows, tmp_path_factory.mktemp("two")) as gateway:
        yield gateway


@pytest.fixture
def one_process(rows: EmbeddedTriton, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway whose admission knows the rate of the model `good`. Tests may kill a process of the model."""
    with rows_gateway(rows, tmp_path, workers="1") as gateway:
        assert answers_of(gateway, "good", range(2000, 4000)).right == 2000
        yield gateway


def answers_of(gateway: GatewayProcess, pipeline: str, items: range, connections: int = 64) -> Answers:
    return asyncio.run(ask(gateway.url, pipeline, items, connections))


def shared(gateway: GatewayProcess, model: str) -> float:
    return gateway.metric("coalesced_requests_total", model=model)


def test_every_caller_gets_its_own_rows(two_workers: GatewayProcess) -> None:
    before = shared(two_workers, "good")
    answers = answers_of(two_workers, "good", range(2000, 6000))
    assert (answers.right, answers.wrong, answers.others) == (4000, [], {})
    assert shared(two_workers, "good") - before > 2000
    calls = two_workers.metric("items_per_call_count", model="good")
    assert two_workers.metric("items_per_call_sum", model="good") > 2 * calls
    assert re.search(r"shared_with\W+[1-9]", two_workers.log)


def test_one_bad_item_fails_alone_and_an_item_that_kills_the_process_is_not_sent_again(
    one_process: GatewayProcess, repository: Path
) -> None:
    """The halves of a call cost at most two calls for each halving: 12 for 64 requests."""
    answers = answers_of(one_process, "good", range(BAD - 6, BAD + 58))
    assert (answers.right, answers.wrong, answers.others) == (63, [], {502: [(BAD, 502)]})
    assert 0 < one_process.metric("coalesced_repeats_total", model="good") <= 12
    answers = answers_of(one_process, "good", range(KILLER - 20, KILLER + 43))
    assert (answers.wrong, set(answers.others)) == ([], {503})
    assert KILLER in answers.failed
    assert (repository / "good" / "killed").read_text().count("killed") == 1
    eventually(lambda: "works again" in one_process.log)
    wait_until_ready(one_process, PATIENCE_S)
    assert answers_of(one_process, "good", range(2000, 2100)).right == 100
