"""Requests share calls to a real Triton; the answers prove whose they are."""

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from app.launcher.launch import EmbeddedOptions
from tests.toolkit.connections import post
from tests.toolkit.listener import read_answer
from tests.toolkit.processes import GatewayProcess, configured_gateway, running_triton, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually

BAD, KILLER = 13, 666
"""Items of ``rows_model.py`` with a meaning: the model fails, and its process ends."""
CONFIG = """
backend: "python"
max_batch_size: 64
input [ { name: "ITEM" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [
  { name: "NEGATIVE" data_type: TYPE_INT64 dims: [ 1 ] },
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
GATEWAY_YAML = """
pipelines:
  good:
    model: good
    inputs: {item: {tensor: ITEM}}
    outputs: {negative: {tensor: NEGATIVE}, text: {tensor: TEXT, kind: text}}
    sample: {item: 3}
    idempotent: true
    coalesce: true
"""


def write_models(folder: Path) -> Path:
    (folder / "good" / "1").mkdir(parents=True)
    (folder / "good" / "config.pbtxt").write_text(CONFIG)
    (folder / "good" / "1" / "model.py").symlink_to(Path(__file__).with_name("rows_model.py"))
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def rows_gateway(
    repository: Path, models_venv: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Tests may kill a process of the model."""
    with (
        running_triton(EmbeddedOptions(repository, models_venv)) as triton,
        configured_gateway(triton, tmp_path_factory.mktemp("gateway"), GATEWAY_YAML, triton_repair="true") as gateway,
    ):
        yield gateway


async def ask(gateway: GatewayProcess, items: Iterable[int]) -> dict[int, int]:
    """Each item once, over 64 connections. A busy machine refuses some with 429: these are sent again.

    Returns the items whose answer is not their own row, and the status of that answer.
    """
    address = urlsplit(gateway.url)
    waiting, others = iter(items), dict[int, int]()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        again = list[int]()
        while (item := again.pop() if again else next(waiting, None)) is not None:
            writer.write(post("/v1/pipelines/good", {"item": item}))
            head, answer = await read_answer(reader)
            status = int(head[9:12])
            if status == 429:
                again.append(item)
                await asyncio.sleep(0.2)
            elif status != 200 or json.loads(answer) != {"negative": -item, "text": f"of {item}"}:
                others[item] = status
        writer.close()

    await asyncio.gather(*(client() for _ in range(64)))
    return others


async def test_every_caller_gets_its_own_rows(rows_gateway: GatewayProcess) -> None:
    assert await ask(rows_gateway, range(2000, 6000)) == {}
    assert rows_gateway.metric("coalesced_requests_total", model="good") > 2000
    calls = rows_gateway.metric("items_per_call_count", model="good")
    assert rows_gateway.metric("items_per_call_sum", model="good") > 2 * calls
    assert re.search(r"shared_with\W+[1-9]", rows_gateway.log)


async def test_one_bad_item_fails_alone_and_an_item_that_kills_the_process_is_not_sent_again(
    rows_gateway: GatewayProcess, repository: Path
) -> None:
    """The halves of a call cost at most two calls for each halving: 12 for 64 requests.

    The requests of the first call to ``ask`` tell the admission the rate of the model.
    """
    assert await ask(rows_gateway, range(2000, 4000)) == {}
    assert await ask(rows_gateway, range(BAD - 6, BAD + 58)) == {BAD: 502}
    assert 0 < rows_gateway.metric("coalesced_repeats_total", model="good") <= 12
    others = await ask(rows_gateway, range(KILLER - 20, KILLER + 43))
    assert (set(others.values()), KILLER in others) == ({503}, True)
    assert (repository / "good" / "killed").read_text().count("killed") == 1
    await asyncio.to_thread(eventually, lambda: "is called again" in rows_gateway.log)
    await asyncio.to_thread(wait_until_ready, rows_gateway, PATIENCE_S)
    assert await ask(rows_gateway, range(2000, 2100)) == {}
