"""Requests share calls to a real Triton, with two workers; the answers prove whose they are."""

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.coalesced import BAD, KILLER, LATE, Answers, ask, rows_gateway, rows_triton
from tests.toolkit.processes import GatewayProcess, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually

MANY = int(os.environ.get("COALESCED_REQUESTS", "1000000"))
"""Of the long test, which takes about 20 seconds for each 100,000."""


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


@pytest.fixture(scope="module")
def one_process(rows: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with one_process_of(rows, tmp_path_factory.mktemp("one")) as gateway:
        yield gateway


@pytest.fixture
def mortal(rows: EmbeddedTriton, tmp_path: Path) -> Iterator[GatewayProcess]:
    """Like ``one_process``, for a test that kills a process of a model."""
    with one_process_of(rows, tmp_path) as gateway:
        yield gateway


@contextmanager
def one_process_of(rows: EmbeddedTriton, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway whose admission knows the rate of the model `good`."""
    with rows_gateway(rows, folder, workers="1", explain="true") as gateway:
        assert answers_of(gateway, "good", range(2000, 4000)).right == 2000
        yield gateway


def answers_of(gateway: GatewayProcess, pipeline: str, items: range, connections: int = 64) -> Answers:
    return asyncio.run(ask(gateway.url, pipeline, items, connections))


def shared(gateway: GatewayProcess, model: str) -> float:
    return gateway.metric("coalesced_requests_total", model=model)


def repeats(gateway: GatewayProcess) -> float:
    return gateway.metric("coalesced_repeats_total", model="good")


def test_every_caller_gets_its_own_rows(two_workers: GatewayProcess) -> None:
    before = shared(two_workers, "good")
    answers = answers_of(two_workers, "good", range(2000, 6000))
    assert (answers.right, answers.wrong, answers.others) == (4000, [], {})
    assert shared(two_workers, "good") - before > 2000
    calls = two_workers.metric("items_per_call_count", model="good")
    assert two_workers.metric("items_per_call_sum", model="good") > 2 * calls


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_million_answers_prove_whose_they_are(two_workers: GatewayProcess) -> None:
    before = shared(two_workers, "good")
    answers = answers_of(two_workers, "good", range(2000, 2000 + MANY), 256)
    assert (answers.right, answers.wrong, answers.others) == (MANY, [], {})
    assert shared(two_workers, "good") - before > 0.9 * MANY


@pytest.mark.parametrize("model", ["drop", "extra", "repeat", "omit", "list", "squeeze"])
def test_the_trial_refuses_a_hostile_model(model: str, two_workers: GatewayProcess) -> None:
    output = {"omit": "TEXT", "list": "BOXES"}.get(model, "NEGATIVE")
    message = f"requests of pipeline '{model}' do not share calls: output '{output}'"
    eventually(lambda: message in two_workers.log)
    answers = answers_of(two_workers, model, range(2000, 2300))
    assert (answers.right, answers.wrong, answers.others) == (300, [], {})
    assert shared(two_workers, model) == 0
    findings = httpx.get(f"{two_workers.url}/v1/findings").json()["findings"]
    assert [(each["tensor"], each["severity"]) for each in findings if each["pipeline"] == model] == [
        (output, "warning")
    ]


def test_a_call_with_other_rows_answers_nobody(one_process: GatewayProcess) -> None:
    outputs = {"late_drop": "NEGATIVE", "late_extra": "NEGATIVE", "late_omit": "TEXT", "late_list": "BOXES"}
    for model, output in outputs.items():
        assert answers_of(one_process, model, range(100, 400)).right == 300
        assert shared(one_process, model) > 0
        answers = answers_of(one_process, model, range(LATE, LATE + 300))
        assert (answers.right, answers.wrong, answers.others) == (300, [], {}), model
        message = rf"model '{model}' do not share calls any more: output '{output}'"
        assert len(re.findall(message, one_process.log)) == 1
        ended = shared(one_process, model)
        assert answers_of(one_process, model, range(LATE, LATE + 300)).right == 300
        assert shared(one_process, model) == ended, model
    findings = httpx.get(f"{one_process.url}/v1/findings").json()["findings"]
    found = [(each["pipeline"], each["tensor"]) for each in findings if each["pipeline"] in outputs]
    assert sorted(found) == sorted(outputs.items())


def test_one_bad_item_of_64_fails_alone(one_process: GatewayProcess) -> None:
    """The halves of a call cost at most two calls for each halving: 12 for 64 requests."""
    before = repeats(one_process)
    answers = answers_of(one_process, "good", range(BAD - 6, BAD + 58))
    assert answers.wrong == []
    assert answers.others == {502: [(BAD, 502)]}
    assert answers.right == 63
    assert 0 < repeats(one_process) - before <= 12


def test_an_item_that_kills_the_process_is_not_sent_again(mortal: GatewayProcess, repository: Path) -> None:
    killed = repository / "good" / "killed"
    before = killed.read_text().count("killed")
    answers = answers_of(mortal, "good", range(KILLER - 20, KILLER + 43))
    assert answers.wrong == []
    assert set(answers.others) == {503}
    assert KILLER in answers.failed
    assert killed.read_text().count("killed") == before + 1
    eventually(lambda: "works again" in mortal.log)
    wait_until_ready(mortal, PATIENCE_S)
    assert answers_of(mortal, "good", range(2000, 2100)).right == 100


def test_requests_under_v2_share_calls(one_process: GatewayProcess) -> None:
    async def infer(client: httpx.AsyncClient, item: int) -> bool:
        body = {"inputs": [{"name": "ITEM", "datatype": "INT64", "shape": [1, 1], "data": [item]}]}
        while (answered := await client.post("/v2/models/good/infer", json=body)).status_code == 429:
            await asyncio.sleep(0.2)
        answer = answered.json()
        outputs = {each["name"]: each["data"] for each in answer["outputs"]}
        return bool(outputs == {"NEGATIVE": [-item], "TEXT": [f"of {item}"]})

    async def infer_all() -> list[bool]:
        async with httpx.AsyncClient(base_url=one_process.url, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(infer(client, item) for item in range(2000, 2100)))

    before = shared(one_process, "good")
    assert asyncio.run(infer_all()) == [True] * 100
    assert shared(one_process, "good") > before


def test_openai_embeddings_of_several_callers_share_calls(one_process: GatewayProcess) -> None:
    """Callers have one text or three."""
    texts_of_callers = [[f"{10 * caller + text}" for text in range(1 + 2 * (caller % 2))] for caller in range(200)]

    async def embed(client: AsyncOpenAI, texts: list[str]) -> list[list[float]]:
        answer = await client.embeddings.create(model="embed", input=texts, encoding_format="float")
        return [each.embedding for each in answer.data]

    async def embed_all() -> list[list[list[float]]]:
        async with AsyncOpenAI(base_url=f"{one_process.url}/v1", api_key="none", max_retries=50) as client:
            return await asyncio.gather(*(embed(client, texts) for texts in texts_of_callers))

    vectors = [[[float(text), -float(text)] for text in texts] for texts in texts_of_callers]
    assert asyncio.run(embed_all()) == vectors
    assert shared(one_process, "embed") > 0
    calls = one_process.metric("items_per_call_count", model="embed")
    assert calls < len(texts_of_callers)
    assert one_process.metric("items_per_call_sum", model="embed") >= sum(map(len, texts_of_callers))


def test_the_log_line_has_the_call_that_the_request_shared(one_process: GatewayProcess) -> None:
    assert re.search(r"shared_with\W+[1-9]", one_process.log)


def test_an_explanation_tells_with_how_many_others_a_request_shared_its_call(one_process: GatewayProcess) -> None:

    async def ask_explained(client: httpx.AsyncClient, item: int) -> dict[str, Any]:
        headers = {"X-Explain": "1", "X-Request-ID": f"item-{item}"}
        while (await client.post("/v1/pipelines/good", json={"item": item}, headers=headers)).status_code == 429:
            await asyncio.sleep(0.2)
        explanation: dict[str, Any] = (await client.get(f"/v1/requests/item-{item}/explain")).json()
        return explanation

    async def ask_all() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=one_process.url, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask_explained(client, item) for item in range(2000, 2064)))

    assert any(found["shared_with"] for found in asyncio.run(ask_all()))
